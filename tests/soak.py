"""The checks of `tests.core.test_bounds` at random, for as long as you like.

    python -m tests.soak --trials 10000 [--seed N] [--only norms clips projection]

Prints what reproduces each finding, a summary, and exits with status 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from collections.abc import Iterator

import numpy as np

from tests.support.properties import CHECKS, MIXTURES, Trial

SPREADS = (0.0, 1.0, 4.0, 20.0)
BOUNDS = (0.0, 1e-30, 1e-3, 0.1, 0.5, 0.999, 1.0, 1.001, 3.0)
SHOWN = 3  # of each kind of finding


def trials(count: int, seed: int) -> Iterator[Trial]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield Trial(
            mixture=str(rng.choice(list(MIXTURES))),
            seed=int(rng.integers(2**30)),
            place=float(rng.random()),
            spread=float(rng.choice(SPREADS)),
            # Half of the bounds are of a size that the list does not foresee.
            bound=float(rng.choice(BOUNDS) if rng.random() < 0.5 else 10 ** rng.uniform(-6, 0.5)),
            sparse=bool(rng.random() < 0.2),
        )


def kind(check: str, finding: str) -> str:
    what, _, rest = finding.partition(":")
    return f"{check}: {what}: {re.split('[0-9]', rest.strip(), maxsplit=1)[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None, help="drawn if it is not given")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}, {options.trials} trials of {', '.join(options.only)}", flush=True)

    failed: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    for number, trial in enumerate(trials(options.trials, seed), 1):
        for name in options.only:
            findings = list(CHECKS[name](trial))
            failed[name] += bool(findings)
            for finding in findings:
                kinds[kind(name, finding)] += 1
                if kinds[kind(name, finding)] <= SHOWN:
                    print(
                        f"FOUND by {name}: {finding}\n  reproduce: list(CHECKS[{name!r}]({trial}))",
                        flush=True,
                    )
        if number % max(1, options.trials // 20) == 0:
            print(f"{number} trials, {sum(failed.values())} failed", flush=True)
    for name in options.only:
        print(f"{name}: {failed[name]} of {options.trials} trials failed")
    for what, count in kinds.most_common():
        print(f"  {count:6}  {what}")
    return int(bool(failed.total()))


if __name__ == "__main__":
    sys.exit(main())
