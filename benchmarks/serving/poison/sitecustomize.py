"""Poison for a fleet's processes: with this folder on PYTHONPATH, requests with certain seeds make them fail.

Requests can only trigger faults that nobody knows yet, so the test has to plant some. It plants them from
outside, in processes that import this module at start-up, and selects them by seed, so that the front end's
checks let the requests pass.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys

from seeds import AT_START, IN_SAMPLING, KILLS


def _fails(sampling):
    if sampling.seed == AT_START:
        raise OverflowError("planted: a number too large")


def _poison_sampler(module):
    start, sample = module.Sampler.start, module.Sampler.sample

    def poisoned_start(self, request_id, sampling, *rest):
        _fails(sampling)
        start(self, request_id, sampling, *rest)

    def poisoned_sample(self, logits, request_ids, indices):
        seeds = {self._samplings[request_id].seed for request_id in request_ids}
        if IN_SAMPLING in seeds:
            raise RuntimeError("planted: sampling fails")
        if KILLS in seeds:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(self, logits, request_ids, indices)

    module.Sampler.start, module.Sampler.sample = poisoned_start, poisoned_sample


def _poison_emulated(module):
    seed_of = module.seed_of

    def poisoned(sampling):
        _fails(sampling)
        if sampling.seed == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        return None if sampling.seed == IN_SAMPLING else seed_of(sampling)  # sampling fails with None

    module.seed_of = poisoned


POISONS = {
    "runtime.engine.torch.sampling.sampler": _poison_sampler,
    "runtime.engine.emulated.engine": _poison_emulated,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Poisons modules right after they have run."""

    def find_spec(self, name, path, target=None):
        if name not in POISONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def poisoned(module):
            run(module)
            POISONS[name](module)

        spec.loader.exec_module = poisoned  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
