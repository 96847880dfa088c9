"""OpenAI's request bodies with vLLM's extensions; unsupported options are refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

LARGEST = 2**31 - 1
"""Largest number that reaches the engine, which adds such numbers up in 64 bits; seeds alone may use all 64
bits, as in vLLM."""
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Prompts = list[str] | list[list[int]]


class _Harmless(AfterValidator):
    """The validator of an unsupported option; its JSON schema lists the harmless values."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.func.harmless]}  # type: ignore[union-attr]


def _off(*harmless: Any) -> AfterValidator:
    """Annotates an unsupported option: only null and values that change nothing are accepted."""

    def check(value: Any) -> Any:
        if value is not None and not any(_same(value, each) for each in harmless):
            raise _refusal("is not supported")
        return value

    check.harmless = harmless  # type: ignore[attr-defined]
    return _Harmless(check)


def _same(value: Any, harmless: Any) -> bool:
    """Whether two values are equal, without treating true as 1 or false as 0."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


def _refusal(text: str) -> PydanticCustomError:
    return PydanticCustomError("refused", text.replace("{", "{{").replace("}", "}}"))  # type: ignore[arg-type]


def _whole(text: str) -> str:
    """The text itself; refuses lone surrogates, which JSON can express but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(f"has a lone surrogate (half of a character) at position {error.start}") from None
    return text


def _prompts(value: Any) -> Prompts:
    """The prompts of a completion, one or more, either all texts or all lists of token ids.

    Checked by hand in one pass over up to a million tokens: pydantic would check a union four times.
    """
    if isinstance(value, str):
        return [_whole(value)]
    if not isinstance(value, list) or not value:
        raise _refusal("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if isinstance(value[0], str):
        if not all(isinstance(each, str) for each in value):
            raise _refusal("starts with a text but also has something else")
        return [_whole(each) for each in value]
    if isinstance(value[0], list):
        for each in value:
            _check_token_ids(each)
        return value
    _check_token_ids(value)
    return [value]


def _check_token_ids(value: Any) -> None:
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise _refusal("must have only texts, or only integers (token ids)")
    if value and not 0 <= min(value) <= max(value) <= LARGEST:
        raise _refusal(f"has a token id outside the range from 0 to {LARGEST}")


_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": LARGEST}}
_TEXTS = {"type": "array", "minItems": 1, "items": {"type": "string"}}
_PROMPT = {"anyOf": [{"type": "string"}, _TOKENS, _TEXTS, {"type": "array", "minItems": 1, "items": _TOKENS}]}
Text = Annotated[str, AfterValidator(_whole)]


class Accepted(BaseModel):
    """Fields that clients send but that have no effect on the answer: any value is accepted."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None
    include_reasoning: Any = None
    priority: Any = None
    request_id: Any = None
    session_id: Any = None


class NotServed(BaseModel):
    """Options of OpenAI and vLLM that would change the answer and are not supported: refused, unless null or
    set to a value that changes nothing."""

    suffix: Annotated[Any, _off("")] = None
    tools: Annotated[Any, _off([])] = None
    tool_choice: Annotated[Any, _off("none", "auto")] = None
    functions: Annotated[Any, _off([])] = None
    function_call: Annotated[Any, _off("none", "auto")] = None
    response_format: Annotated[Any, _off({"type": "text"})] = None
    structured_outputs: Annotated[Any, _off()] = None
    structural_tag: Annotated[Any, _off()] = None
    guided_json: Annotated[Any, _off()] = None
    guided_regex: Annotated[Any, _off()] = None
    guided_choice: Annotated[Any, _off()] = None
    guided_grammar: Annotated[Any, _off()] = None
    guided_decoding_backend: Annotated[Any, _off()] = None
    guided_whitespace_pattern: Annotated[Any, _off()] = None
    prompt_embeds: Annotated[Any, _off([])] = None
    prompt_logprobs: Annotated[Any, _off()] = None
    logprob_token_ids: Annotated[Any, _off([])] = None
    allowed_token_ids: Annotated[Any, _off()] = None
    bad_words: Annotated[Any, _off([])] = None
    logits_processors: Annotated[Any, _off([])] = None
    use_beam_search: Annotated[Any, _off(False)] = None
    length_penalty: Annotated[Any, _off(1.0)] = None
    early_stopping: Annotated[Any, _off(False)] = None
    truncate_prompt_tokens: Annotated[Any, _off()] = None
    truncation_side: Annotated[Any, _off()] = None
    spaces_between_special_tokens: Annotated[Any, _off(True)] = None
    repetition_detection: Annotated[Any, _off()] = None
    thinking_token_budget: Annotated[Any, _off()] = None
    watermarking: Annotated[Any, _off(False)] = None
    return_tokens_as_token_ids: Annotated[Any, _off(False)] = None
    return_token_ids: Annotated[Any, _off(False)] = None
    return_token_offsets: Annotated[Any, _off(False)] = None
    return_prompt_text: Annotated[Any, _off(False)] = None
    stream_interval: Annotated[Any, _off(1)] = None
    cache_salt: Annotated[Any, _off()] = None
    kv_transfer_params: Annotated[Any, _off()] = None
    ec_transfer_params: Annotated[Any, _off()] = None
    vllm_xargs: Annotated[Any, _off({})] = None


class StreamOptions(BaseModel):
    """Options of a stream. include_obfuscation is accepted and has no effect."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class GenerateRequest(Accepted, NotServed):
    """The fields that completions and chat completions share. Unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, le=LARGEST)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=100, allow_inf_nan=False)
    logit_bias: dict[TokenIdText, Bias] | None = None
    min_tokens: int | None = Field(default=None, ge=0, le=LARGEST)
    max_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    n: int | None = Field(default=None, ge=1, le=LARGEST)
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    ignore_eos: bool = False

    @property
    def stop_strings(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as pairs of (token id, bias)."""
        return tuple({int(token): bias for token, bias in (self.logit_bias or {}).items()}.items())

    @property
    def usage_at_end(self) -> bool:
        """Whether the last chunk of a stream reports the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk of a stream reports the usage so far (vLLM's extension)."""
        return self.usage_at_end and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerateRequest):
    """Body of /v1/completions. prompt: a text, a list of token ids, or a list of either."""

    prompt: Annotated[Prompts, PlainValidator(_prompts), WithJsonSchema(_PROMPT)]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None
    echo: bool | None = None
    add_special_tokens: Annotated[Any, _off(True)] = None

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, info.data.get("n") or 1):
            raise _refusal("is supported only if it equals n")
        return best_of

    @field_validator("echo")
    @classmethod
    def _echo_has_no_logprobs(cls, echo: bool | None, info: ValidationInfo) -> bool | None:
        if echo and info.data.get("logprobs") is not None:
            raise _refusal("is not supported with logprobs: this server does not compute logprobs of prompts")
        return echo


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """A message of the conversation so far. Tool calls and other unsupported fields are refused unless they
    are empty."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    tool_calls: Annotated[Any, _off([])] = None
    tool_call_id: Annotated[Any, _off()] = None
    function_call: Annotated[Any, _off()] = None
    refusal: Annotated[Any, _off("")] = None
    audio: Annotated[Any, _off()] = None
    annotations: Annotated[Any, _off([])] = None
    reasoning: Annotated[Any, _off("")] = None
    reasoning_content: Annotated[Any, _off("")] = None

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates expect."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerateRequest):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Annotated[Any, _off(False)] = None
    continue_final_message: Annotated[Any, _off(False)] = None
    add_generation_prompt: Annotated[Any, _off(True)] = None
    add_special_tokens: Annotated[Any, _off(False)] = None
    chat_template: Annotated[Any, _off()] = None
    chat_template_kwargs: Annotated[Any, _off({})] = None
    documents: Annotated[Any, _off([])] = None
    modalities: Annotated[Any, _off(["text"])] = None
    audio: Annotated[Any, _off()] = None
    moderation: Annotated[Any, _off()] = None
    reasoning_effort: Annotated[Any, _off("none")] = None
    verbosity: Annotated[Any, _off()] = None
    web_search_options: Annotated[Any, _off()] = None
    media_io_kwargs: Annotated[Any, _off({})] = None
    mm_processor_kwargs: Annotated[Any, _off({})] = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise _refusal("needs logprobs to be true")
        return top_logprobs
