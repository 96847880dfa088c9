"""The public functions of `import hexgen2`, which the command line calls too.

Arguments have the names of the command line's options, with units. Clusters, models, workloads and placements
are names, paths or objects. Nothing is printed. Errors are InputError and InfeasibleError; their text is what
the command line prints, with options spelled as on the command line.

Heavy modules are imported inside the functions to keep `import hexgen2` fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.errors import HexGen2Error, InputError

if TYPE_CHECKING:
    from cluster_specs.schema import ClusterSpec
    from cost_model.architecture import ModelArchitecture
    from cost_model.pipeline import PipelineSemantics
    from hexgen2.comparison.run import Comparison
    from hexgen2.estimation.single import StepEstimate
    from hexgen2.goal import Goal, Objective
    from hexgen2.network.shared_links import Links
    from hexgen2.placement import Placement
    from hexgen2.results import SimulationResult
    from hexgen2.search.problem import Engine, Phases
    from hexgen2.simulator.batching import Policy
    from hexgen2.simulator.options import OutputLengths
    from hexgen2.simulator.simulation import Simulation
    from hexgen2.strategies.base import SearchProgress
    from hexgen2.workload.lengths import Workload

STRATEGIES = "hexgen2,hexgen,splitwise,vllm"
"""The strategies that `compare` runs by default."""


def search(
    *,
    cluster: str | Path | ClusterSpec | None = None,
    model: str | Path | ModelArchitecture | None = None,
    workload: str | Path | Workload | None = None,
    case: str | Path | None = None,
    isl: float | None = None,
    osl: float | None = None,
    weights: str | None = None,
    kv: str | None = None,
    goal: Goal | None = None,
    objective: Objective = "throughput",
    request_rate: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    budget_per_hour: float | None = None,
    frontier: int | None = None,
    strategy: str = "hexgen2",
    cost_model: str | Path | None = None,
    pipeline: PipelineSemantics = "pipelined",
    links: Links = "shared",
    engine: Engine = "any",
    phases: Phases | None = None,
    partial_inference: bool | None = None,
    latency_aware: bool = False,
    certify: bool = False,
    robust: bool = False,
    seed: int = 0,
    time_limit_s: float | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
) -> Placement:
    """Find a placement: which GPUs form which replica, how each is parallelised, how KV caches flow.

    The same arguments give the same placement, times aside, unless a time limit cuts the search short;
    `placement.search.cut` then says so. Ctrl-C ends the search early: the best placement found so far is
    returned, with `search.cut == "interrupted"`; before the first one, KeyboardInterrupt is raised.

    Parameters
    ----------
    cluster : shipped name (`hexgen2 list clusters`), YAML file, or spec
    model : shipped name, folder with a Hugging Face config.json, or architecture
    workload : shipped class, shares of several ("HPLD:2,LPHD:1"), trace file, or workload
    case : "FILE#NAME", measured tables of tokens/s instead of a cluster and a model (docs/strategies.md); for
        strategies that place ranges of layers
    isl, osl : mean prompt and output tokens; instead of a workload, or to override the workload's
    weights, kv : number formats of weights and KV caches; the model's own if not given
    goal : instead of the following six options
    objective : "throughput", "goodput" (needs a target), "cost" or "latency" (both need request_rate)
    request_rate : mean arrival rate in requests/s; arrivals are random
    ttft_ms, tpot_ms : targets for the time to first token and the time per output token
    budget_per_hour : US dollars per hour that the GPUs in use may cost
    frontier : number of prices up to the budget for which to list the best rental
    strategy : see `hexgen2 list strategies`
    cost_model : how times are predicted: a name ("vllm", the default, "sglang", "trtllm", "calibrated",
        "zero-fit" or "table1"), a file that `hexgen2 calibrate` wrote, or FILE:ENGINE
    pipeline : how the times of pipeline stages add up
    links : "shared" or "pairwise": whether KV routes compete for links, network cards and uplinks
    engine : "vllm" limits the search to replicas that vLLM can run
    phases : whether replicas do one phase each ("disaggregated"), both for their own requests ("colocated"),
        or whatever serves most, also for one another ("flexible", the default); only strategies hexgen2 and
        exact have this choice
    partial_inference : whether requests may skip layers of a node that they have passed; True if not given.
        Only strategies that place ranges of layers have this choice
    latency_aware : of strategy "helix": maximise what is kept up once KV caches are full, in place of the
        flow; the longer requests are under way, the less that is
    certify : spend some more seconds on proving how good the answer is
    robust : of the best placements found, choose the one that fares best where costs are off, by its 10th
        percentile over perturbations of them; `placement.robustness` then says how each fares
    seed : of the search
    time_limit_s : seconds
    progress : called with the state of the search after each improvement

    Raises
    ------
    InputError : an argument is wrong
    InfeasibleError : no placement serves a single request, or none meets the goal

    Examples
    --------
    >>> import hexgen2
    >>> p = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD")
    >>> [(replica.id, replica.shape) for replica in p.replicas][:2]
    [('colocated-0', 'tp1'), ('colocated-1', 'tp1')]
    >>> p.replicas[0].stages[0].gpus
    ['a100-1/0']
    >>> p.throughput.req_s <= p.bound.req_s
    True
    """
    began_s = time.monotonic()
    from dataclasses import replace

    from hexgen2.goal import Goal, check_goal, make_goal
    from hexgen2.search.problem import make_problem
    from hexgen2.strategies.registry import CHOOSE_PHASES, RANGES, find_strategy, phases_of

    find = find_strategy(strategy)
    options = objective, request_rate, ttft_ms, tpot_ms, budget_per_hour, frontier
    if goal is None:
        goal = make_goal(*options)
    elif make_goal(*options) != Goal():
        raise InputError("goal", "", "is given twice, as an object and as options", "give only one of them")
    check_goal(goal)
    _check_choices(pipeline=pipeline, links=links, engine=engine, phases=phases)
    if phases is not None and strategy not in CHOOSE_PHASES:
        remedy = f"leave it out, or use {' or '.join(CHOOSE_PHASES)}"
        raise InputError("--phases", phases, f"does not go with --strategy {strategy}", remedy)
    ranges = strategy in RANGES
    if latency_aware and strategy != "helix":
        problem_text = f"does not go with --strategy {strategy}"
        raise InputError("--latency-aware", "", problem_text, "use --strategy helix")
    _check_range_options(strategy, ranges, partial_inference, case, cluster, model, weights or kv)
    if certify and (strategy not in ("hexgen2", "helix") or goal.rents or goal.objective == "latency"):
        raise InputError("--certify", "", "only works with a plain search by hexgen2", "leave it out here")
    if robust and strategy not in ("hexgen2", "exact"):
        raise InputError("--robust", "", f"does not go with --strategy {strategy}", "use hexgen2 or exact")
    if robust and goal.rents:
        raise InputError("--robust", "", "does not choose what to rent", "leave it out, or give no --budget")
    if case is not None:
        from hexgen2.search.layer_ranges.case import load_case
        from hexgen2.search.layer_ranges.from_case import problem_of_case

        problem = problem_of_case(
            load_case(str(case)), partial_inference is not False, workload, isl, osl, cost_model
        )
        problem = replace(problem, goal=goal, pipeline=pipeline, latency_aware=latency_aware)
    else:
        assert cluster is not None and model is not None
        problem = make_problem(
            *(cluster, model, workload, isl, osl, cost_model, pipeline, goal),
            links=links,
            engine=engine,
            phases=phases or phases_of(strategy),
            weights=weights,
            kv=kv,
        )
        partial = partial_inference is not False
        problem = replace(problem, partial_inference=partial, latency_aware=latency_aware)
    left_s = _time_left_s(time_limit_s, began_s)
    placement = find(problem, _search_options(seed, left_s, certify, progress, robust))
    if engine == "vllm":
        from hexgen2.export.vllm_command import check_vllm

        check_vllm(placement, f"the placement of {strategy}")
    return _checked(placement)


def replan(
    placement: Placement | str | Path,
    *,
    lost: str | Sequence[str] = (),
    added: str | Sequence[str] = (),
    cluster: str | Path | ClusterSpec | None = None,
    model: str | Path | ModelArchitecture | None = None,
    workload: str | Path | Workload | None = None,
    isl: float | None = None,
    osl: float | None = None,
    weights: str | None = None,
    kv: str | None = None,
    cost_model: str | Path | None = None,
    pipeline: PipelineSemantics | None = None,
    links: Links | None = None,
    horizon_s: float | None = None,
    load_gbyte_s: float | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    progress: Callable[[SearchProgress], None] | None = None,
) -> Placement:
    """Find the next placement of a running fleet after GPUs were lost or added, or the workload changed.

    Re-planning weighs the cost of moving replicas against the gain; `moves` and `migration` of the result say
    how to get there. Ranges of layers are planned anew by the strategy that made them, without either.
    Arguments not given keep the values of `placement`. Ctrl-C works as in `search`.

    With attention workers, the strategy that made the placement plans anew over what is left; moves are not
    weighed.

    Parameters
    ----------
    placement : the running one, or its file
    lost, added : ids of GPUs ("h100-1/0") or names of nodes, as a sequence or separated by commas
    horizon_s : seconds that the new placement will serve; 3600 if not given
    load_gbyte_s : GB/s at which a GPU loads weights; 2 (an assumption) if not given

    Others : see `search`

    Raises
    ------
    InputError : an argument is wrong, or the placement was made for an objective other than throughput
    InfeasibleError : the GPUs that are left cannot serve a single request

    Examples
    --------
    >>> import hexgen2
    >>> p = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD")
    >>> q = hexgen2.replan(p, lost=["h100-1/0"])
    >>> q.lost, q.migration.before_req_s > q.throughput.req_s
    (['h100-1/0'], True)
    """
    began_s = time.monotonic()
    from dataclasses import replace

    from hexgen2.replan.migration import Terms
    from hexgen2.replan.request import replan_problem
    from hexgen2.replan.search import replan as run
    from hexgen2.strategies.registry import find_strategy

    previous, source = _loaded(placement)
    _check_ranges_from(previous, source, horizon_s, load_gbyte_s)
    if previous.goal.objective != "throughput":
        key, problem_text = f"{source}: goal.objective", "re-planning can only optimise throughput"
        raise InputError(key, "", problem_text, "leave the goal out, or run a new search without --from")
    terms = Terms()
    if horizon_s is not None:
        terms = replace(terms, horizon_s=_in_range("--horizon", horizon_s))
    if load_gbyte_s is not None:
        terms = replace(terms, load_bytes_s=_in_range("--load-gbyte-s", load_gbyte_s) * 1e9)
    _check_choices(pipeline=pipeline, links=links)
    left, joined = (",".join([gpus] if isinstance(gpus, str) else gpus) for gpus in (lost, added))
    problem = replan_problem(
        previous,
        cluster,
        model,
        workload,
        isl,
        osl,
        cost_model,
        pipeline,
        links,
        left,
        joined,
        weights,
        kv,
    )
    options = _search_options(seed, _time_left_s(time_limit_s, began_s), False, progress)
    if previous.attention_workers:
        return _checked(find_strategy(previous.strategy)(problem, options))
    if previous.layer_ranges is not None:
        problem = replace(problem, latency_aware=previous.layer_ranges.latency_aware)
        return _checked(find_strategy(previous.strategy)(problem, options))
    return _checked(run(problem, previous, options, terms))


def _check_ranges_from(
    previous: Placement, source: str, horizon_s: float | None, load_gbyte_s: float | None
) -> None:
    """Refuse what ranges of layers, which are planned anew, do not have."""
    if previous.layer_ranges is None:
        return
    if previous.layer_ranges.tables is not None:
        problem = "the tokens/s of nodes were given, and those of others are not known"
        raise InputError(source, "layer_ranges.tables", problem, "search again, with another --case")
    for option, value in (("--horizon", horizon_s), ("--load-gbyte-s", load_gbyte_s)):
        if value is not None:
            problem = f"does not go with {source}, whose ranges of layers are planned anew"
            raise InputError(option, "", problem, "leave it out")


def simulate(
    placement: Placement | str | Path,
    *,
    workload: str | Path | Workload | None = None,
    isl: float | None = None,
    osl: float | None = None,
    length_range: float = 1.0,
    request_rate: float | None = None,
    offline: bool = False,
    max_concurrency: int | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    burstiness: float = 1.0,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    policy: Policy = "mixed",
    step_tokens: int | None = None,
    max_batch: int | None = None,
    queue_limit: int | None = None,
    failures: Sequence[tuple[str, float]] = (),
    replans: Sequence[tuple[Placement | str | Path, float]] = (),
    recover: bool = True,
    shift_load: bool = True,
    scheduler: str | None = None,
    output_lengths: str | OutputLengths | None = None,
    seed: int = 0,
    requests_out: str | Path | None = None,
    progress: Callable[[Simulation], None] | None = None,
) -> SimulationResult:
    """Simulate a placement under load: throughput, TTFT, TPOT, queues and traffic.

    Step and transfer times come from the cost model.

    The same arguments give the same result.

    Parameters
    ----------
    placement : a placement or its file
    workload, isl, osl : see `search`; the placement's own if none is given; a trace with arrival times is
        replayed
    length_range : r: lengths are drawn uniformly from r * x to x, where x is isl or osl; 1: no range
    request_rate : mean arrival rate in requests/s; arrivals are random
    offline : all requests arrive at once
    max_concurrency : most requests in flight, as in vLLM's benchmark: one that arrives while as many are is
        sent when one of them ends. With neither a rate nor times of arrival, it is a closed loop of that many
        clients, each of which sends its next request as soon as its last one has ended. TTFT counts from the
        sending
    num_requests : how many; if not given, enough for a steady state: 10 for each request that the placement
        decodes at a time, but 2000 to 20,000
    duration_s : seconds; requests that would arrive later are left out
    burstiness : 1 is Poisson, less is burstier
    ttft_ms, tpot_ms : targets, for `request_goodput` and `attainment`; the placement's if not given
    policy : how colocated replicas mix the phases: "mixed" as the runtime, "chunked" as vLLM,
        "chunked-prefill-first" as SGLang, "inflight" as TensorRT-LLM, "prefill-first" as vLLM before chunked
        prefill (see hexgen2/simulator/batching.py)
    step_tokens : most tokens in a step with prompts (vLLM's max_num_batched_tokens); the placement's if not
        given
    max_batch : most requests that a replica decodes at a time (vLLM's max_num_seqs); the placement's if not
        given
    queue_limit : requests that may wait; further ones fail
    failures : (replica, seconds): replicas to lose, and when
    replans : (placement, seconds): placements made by `replan` to switch to, and when
    recover : whether requests of a lost replica resume elsewhere or fail
    shift_load : whether shares of routes move when requests wait and are longer or shorter than planned
    scheduler : how the route of a request is chosen, or with ranges of layers (helix) its path: "flow" (the
        default, as planned), "workload-aware", "memory", "round-robin", "weighted" or "single"; of a path
        "flow", "swarm", "random" or "shortest-queue" (see hexgen2/schedulers.py)
    output_lengths : what the schedulers "workload-aware" and "memory" expect of a request's output: "buckets"
        (the default), "distribution", or a predictor (see runtime/routing/output_lengths.py)
    seed : of lengths and arrivals
    requests_out : CSV file to write, with a line per request
    progress : called regularly with the simulation

    Raises
    ------
    InputError : an argument is wrong, or the arguments contradict each other

    Examples
    --------
    >>> import hexgen2
    >>> p = hexgen2.search(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD")
    >>> r = hexgen2.simulate(p, request_rate=4.0, num_requests=200, seed=1)
    >>> r.completed, r.failed
    (200, 0)
    >>> r.mean_ttft_ms <= r.p99_ttft_ms
    True
    >>> list(r.to_dict())[:4]
    ['placement', 'cluster', 'model', 'requests']
    """
    from cost_model.files import written
    from hexgen2.schedulers import PATH_SCHEDULERS, SCHEDULERS
    from hexgen2.simulator.options import Failure, Options, Replan
    from hexgen2.simulator.run import simulate as run
    from hexgen2.simulator.run import steady_requests
    from hexgen2.workload.arrivals import LengthSource, arrivals

    placed, source = _loaded(placement)
    for_paths = scheduler in PATH_SCHEDULERS and scheduler not in SCHEDULERS
    if scheduler is not None and for_paths and placed.layer_ranges is None:
        problem = f"chooses paths through ranges of layers, which {source} does not have"
        raise InputError("--scheduler", scheduler, problem, f"use one of {', '.join(SCHEDULERS)}")
    _check_choices(policy=policy)
    asked = {"request_rate": request_rate, "duration_s": duration_s, "burstiness": burstiness}
    targets = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
    for name, value in (asked | targets).items():
        if value is not None:
            _in_range(f"--{name.removesuffix('_ms').replace('_', '-')}", value)
    counts = {"max-concurrency": max_concurrency, "step-tokens": step_tokens, "max-batch": max_batch}
    for name, count in counts.items():
        if count is not None:
            _in_range(f"--{name}", count, 1)
    fixed = workload is None and isl is None and osl is None
    lengths = LengthSource.load(placed.workload if fixed else workload, isl, osl, length_range)
    times = request_rate, offline, num_requests, duration_s, burstiness, seed
    requests = arrivals(lengths, *times, steady_requests(placed), max_concurrency)
    goal = placed.goal.model_copy(update={key: value for key, value in targets.items() if value is not None})
    placed = placed.model_copy(update={"goal": goal})
    lost = [Failure(at_s, replica) for replica, at_s in failures]
    following = [Replan(at_s, _following(each, placed)) for each, at_s in replans]
    limits = step_tokens, max_batch, max_concurrency
    options = Options(
        *(policy, queue_limit, lost, following, recover, 0.0, *limits),
        shift_load=shift_load,
        scheduler=scheduler,
        output_lengths=output_lengths,
        seed=seed,
    )
    with written(Path(requests_out)) if requests_out else nullcontext() as stream:
        return run(placed, requests, options, stream, progress)


def compare(
    *,
    cluster: str | Path | ClusterSpec,
    model: str | Path | ModelArchitecture,
    workload: str | Path | Workload | Sequence[str | Path | Workload],
    strategies: str | Sequence[str] = STRATEGIES,
    weights: str | None = None,
    kv: str | None = None,
    share: float = 0.75,
    seconds: float = 300.0,
    ttft_ms: float | None = None,
    tpots_ms: Sequence[float] = (),
    cost_model: str | Path | None = None,
    pipeline: PipelineSemantics = "pipelined",
    links: Links = "shared",
    time_limit_s: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Make a placement with each of several strategies and simulate all of them under the same requests.

    Parameters
    ----------
    cluster, model : see `search`
    workload : one or several, as a sequence or as names separated by commas
    strategies : a sequence, or separated by commas; NAME@CLUSTER gives a strategy a cluster of its own,
        NAME:POLICY a batching policy of its own (see `simulate`), and hexgen2:PHASES its choice of phases
    weights, kv : see `search`
    share : online load, as a share of each strategy's own peak throughput
    seconds : length of the load in each simulation
    ttft_ms, tpots_ms : also find, within each of these targets per output token, the goodput of each choice
        of phases (see `search`)
    cost_model, pipeline, links, time_limit_s, seed : see `search`
    progress : called with a line of text before each step

    Raises
    ------
    InputError : an argument is wrong

    Examples
    --------
    >>> import hexgen2
    >>> found = hexgen2.compare(cluster="hexgen2-case-study", model="llama-2-13b", workload="LPLD",
    ...                         strategies=["distserve", "vllm"], seconds=2)
    >>> [row["strategy"] for row in found.rows()]
    ['distserve', 'vllm']
    """
    from cost_model.dtypes import in_formats
    from cost_model.models import find_model
    from cost_model.registry import find_cost_model
    from hexgen2.comparison.contenders import parse_contenders
    from hexgen2.comparison.run import Settings
    from hexgen2.comparison.run import compare as run

    _check_choices(pipeline=pipeline, links=links)
    if isinstance(workload, str):
        workload = [name.strip() for name in workload.split(",") if name.strip()]
    workloads = workload if isinstance(workload, Sequence) else [workload]
    contenders = parse_contenders(
        strategies if isinstance(strategies, str) else ",".join(strategies), cluster
    )
    _in_range("--share", share, 0.01, 0.99)
    _in_range("--seconds", seconds)
    limit_s = _search_options(seed, time_limit_s).time_limit_s
    if weights is not None or kv is not None:
        model = in_formats(find_model(model), weights, kv)
    for tpot_ms in tpots_ms:
        _in_range("--tpot", tpot_ms)
    if ttft_ms is not None:
        _in_range("--ttft", ttft_ms)
        if not tpots_ms:
            raise InputError("--ttft", "", "goes with targets per output token", "give --tpot, too")
    how = find_cost_model(cost_model), pipeline, links, limit_s
    settings = Settings(model, seed, share, seconds, *how, ttft_ms, tuple(tpots_ms))
    return run(contenders, workloads, settings, progress or (lambda text: None))


def estimate(
    *,
    gpu: str,
    model: str | Path | ModelArchitecture,
    isl: int,
    osl: int = 0,
    tp: int | None = None,
    pp: int = 1,
    batch: int = 1,
    weights: str | None = None,
    kv: str | None = None,
    interconnect: str | None = None,
    engine: str | None = None,
    cost_model: str | Path | None = None,
    attention_dp: int = 1,
    expert_parallel: int = 1,
) -> StepEstimate:
    """Predict prefill time, decode step time, memory and the largest batch.

    Parameters
    ----------
    gpu : NAME:COUNT, such as "H100:8"
    model : see `search`
    isl, osl : prompt and output tokens of each request
    tp, pp : tensor-parallel degree (all GPUs of a stage if not given) and number of pipeline stages
    batch : requests in a step
    weights, kv : number formats; the model's own if not given
    interconnect : class of the links between the GPUs; the usual one for these cards if not given
    engine : "vllm", "sglang" or "trtllm"; with a cost model, one that its coefficients, or its file, know (an
        average engine if not given, or the file's vllm or only one)
    attention_dp : groups of each stage's GPUs that run attention for requests of their own
    expert_parallel : groups of each stage's GPUs that divide the experts among them
    cost_model : as in `search`; that of `engine` if not given

    Raises
    ------
    InputError : an argument is wrong

    Examples
    --------
    >>> import hexgen2
    >>> e = hexgen2.estimate(gpu="H100:8", model="llama-2-70b", tp=8, batch=16, isl=512, osl=128)
    >>> e.fits, e.decode_ms < e.prefill_ms
    (True, True)
    """
    from hexgen2.estimation.single import estimate_step

    for option, value, least in (
        ("--isl", isl, 1),
        ("--osl", osl, 0),
        ("--batch", batch, 1),
        ("--pp", pp, 1),
        ("--attention-dp", attention_dp, 1),
        ("--expert-parallel", expert_parallel, 1),
    ):
        _in_range(option, value, least, 10**7)
    return estimate_step(
        *(gpu, model, isl, osl, tp, pp, batch),
        *(weights, kv, interconnect, engine, cost_model, attention_dp, expert_parallel),
    )


def load_placement(path: str | Path) -> Placement:
    """Read a placement and check it.

    Raises
    ------
    InputError : the file is unreadable, is not a placement, or breaks an invariant; the error names the key
    """
    return _loaded(path)[0]


def _loaded(placement: Placement | str | Path) -> tuple[Placement, str]:
    """A checked placement, and its name for error messages."""
    from hexgen2.checks import verify
    from hexgen2.placement import Placement

    if isinstance(placement, Placement):
        source = "placement"
    else:
        source = str(placement)
        placement = Placement.load(placement)
    verify(placement, source)
    return placement, source


def _checked(placement: Placement) -> Placement:
    """A placement that a strategy just made; breaking an invariant is a bug in the strategy."""
    from hexgen2.checks import violations

    for key, problem in violations(placement):
        strategy = placement.strategy
        raise HexGen2Error(f"{strategy} made an invalid placement: {key}: {problem}; please report this bug")
    return placement


def _following(placement: Placement | str | Path, before: Placement) -> Placement:
    """A placement to switch to; it must have the same model, and moves."""
    found, source = _loaded(placement)
    remedy = "make it with `hexgen2 search --from`"
    if found.model != before.model:
        raise InputError(source, "model", f"is {found.model.name}, not {before.model.name}", remedy)
    if not found.moves:
        raise InputError(
            source, "moves", "are missing, so it is unknown which GPUs must load weights", remedy
        )
    return found


def _check_range_options(
    strategy: str,
    ranges: bool,
    partial_inference: bool | None,
    case: str | Path | None,
    cluster: object,
    model: object,
    formats: str | None,
) -> None:
    """Refuse options of ranges of layers with other strategies, and a case beside a cluster or model."""
    given: object
    for option, given in (("--case", case), ("--partial-inference", partial_inference)):
        if given is not None and not ranges:
            raise InputError(option, "", f"does not go with --strategy {strategy}", "use --strategy helix")
    if case is None:
        for option, given in (("--cluster", cluster), ("--model", model)):
            if given is None:
                raise InputError(option, "", "is missing", "name one")
        return
    for option, given in (("--cluster", cluster), ("--model", model), ("--weights or --kv", formats)):
        if given is not None:
            raise InputError(option, "", "does not go with --case", "leave it out")


def _time_left_s(time_limit_s: float | None, began_s: float) -> float | None:
    """What is left of a time limit that counts from time.monotonic() = began_s; checked, and never 0."""
    if time_limit_s is None:
        return None
    from hexgen2.goal import SMALLEST

    return max(SMALLEST, _in_range("--time-limit", time_limit_s) - (time.monotonic() - began_s))


def _search_options(
    seed: int,
    time_limit_s: float | None,
    certify: bool = False,
    progress: Any = None,
    robust: bool = False,
) -> Any:
    from hexgen2.strategies.base import SearchOptions

    _in_range("--seed", seed, 0, 2**63 - 1)
    if time_limit_s is not None:
        _in_range("--time-limit", time_limit_s)
    return SearchOptions(seed, time_limit_s, certify, progress, robust=robust)


def _in_range(option: str, value: float, least: float | None = None, most: float | None = None) -> float:
    """The value; InputError outside [least, most] (default: the range for rates, times and prices)."""
    from hexgen2.goal import LARGEST, SMALLEST

    least, most = SMALLEST if least is None else least, LARGEST if most is None else most
    if not least <= value <= most:
        raise InputError(option, "", f"is {value!r}", f"give a number from {least:g} to {most:g}")
    return value


def _check_choices(**values: str | None) -> None:
    """Refuse unknown values of options with a fixed set of choices; None means not given."""
    from typing import get_args

    from cost_model.pipeline import PIPELINE_SEMANTICS
    from hexgen2.network.shared_links import Links
    from hexgen2.search.problem import Engine, Phases
    from hexgen2.simulator.batching import POLICIES

    known: dict[str, Sequence[str]] = {
        "pipeline": PIPELINE_SEMANTICS,
        "links": get_args(Links),
        "engine": get_args(Engine),
        "phases": get_args(Phases),
        "policy": POLICIES,
    }
    for name, value in values.items():
        if value is not None and value not in known[name]:
            raise InputError(f"--{name}", "", f"is {value!r}", f"use one of {', '.join(known[name])}")
