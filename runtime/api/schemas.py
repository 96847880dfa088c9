"""OpenAI's request bodies with vLLM's extensions; what is not served is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
LARGEST = 2**31 - 1
"""Of numbers that reach the engine, which holds them in 64 bits and adds them up; as in vLLM, a seed may have
all 64."""
TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
TokenIdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class _Harmless(AfterValidator):
    """The validator of an option that is not served, described by the values that it may have."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": [None, *self.func.harmless]}  # type: ignore[union-attr]


def _off(*harmless: Any) -> AfterValidator:
    """Of an option that is not served: null, or what changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in harmless:
            raise _refusal("is not supported")
        return value

    check.harmless = harmless  # type: ignore[attr-defined]
    return _Harmless(check)


def _refusal(text: str) -> PydanticCustomError:
    return PydanticCustomError("refused", text)  # type: ignore[arg-type]


def _whole(text: str) -> str:
    """The text; half of a character (a lone surrogate, which JSON can write) is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refusal(f"has half of a character (a lone surrogate) at {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


class NotServed(BaseModel):
    """Options of OpenAI and vLLM that would change the answer, and are refused."""

    suffix: Annotated[Any, _off("")] = None
    tools: Annotated[Any, _off([])] = None
    tool_choice: Annotated[Any, _off("none", "auto")] = None
    functions: Annotated[Any, _off([])] = None
    response_format: Annotated[Any, _off({"type": "text"})] = None
    structured_outputs: Annotated[Any, _off()] = None
    guided_json: Annotated[Any, _off()] = None
    guided_regex: Annotated[Any, _off()] = None
    guided_choice: Annotated[Any, _off()] = None
    guided_grammar: Annotated[Any, _off()] = None
    prompt_logprobs: Annotated[Any, _off()] = None
    allowed_token_ids: Annotated[Any, _off()] = None
    bad_words: Annotated[Any, _off([])] = None
    use_beam_search: Annotated[Any, _off(False)] = None
    truncate_prompt_tokens: Annotated[Any, _off()] = None
    add_special_tokens: Annotated[Any, _off(True)] = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class GenerateRequest(NotServed):
    """What completions and chat completions have in common."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    stream: bool = False
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
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
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
        """logit_bias with token ids as numbers."""
        return tuple({int(token): bias for token, bias in (self.logit_bias or {}).items()}.items())


class CompletionRequest(GenerateRequest):
    """Body of /v1/completions. prompt: one text, several, one list of token ids, or several."""

    prompt: Text | list[TokenId] | list[Text] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None
    echo: bool | None = None

    @field_validator("best_of")
    @classmethod
    def _best_of_is_n(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of not in (None, info.data.get("n") or 1):
            raise _refusal("is supported only where it equals n")
        return best_of

    @field_validator("echo")
    @classmethod
    def _echo_has_no_logprobs(cls, echo: bool | None, info: ValidationInfo) -> bool | None:
        if echo and info.data.get("logprobs") is not None:
            raise _refusal("is not supported with logprobs: those of the prompt are not known")
        return echo

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """The message as a chat template takes it."""
        if isinstance(self.content, list):
            return {"role": self.role, "content": "".join(part.text for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class ChatRequest(GenerateRequest):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Annotated[Any, _off(False)] = None
    continue_final_message: Annotated[Any, _off(False)] = None
    add_generation_prompt: Annotated[Any, _off(True)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_need_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs is not None and not info.data.get("logprobs"):
            raise _refusal("needs logprobs to be true")
        return top_logprobs
