"""The audit of the hand-written tables: what a run of every pico model says, against what its table says.

    python benchmarks/audit.py                      every pico model (a minute)
    python benchmarks/audit.py --classes            also every other class that transformers has for a family
    python benchmarks/audit.py --growths            also what inference reaches of what tables can grow (minutes)

A difference is a fault, or has one of the reasons of tests/auditing/explained.py. One that has none makes this command
fail.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import shown

if TYPE_CHECKING:
    from auditing.audit import Audit
    from auditing.growths import Growth

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(shown.ROOT / "tests"), str(shown.ROOT / "src")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", action="store_true", help="every class of transformers, too")
    parser.add_argument("--growths", action="store_true", help="compare what can grow")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    began = time.process_time()
    found = audits(options.classes)
    text = audited(found)
    print(f"{text}\n\n{time.process_time() - began:.0f} CPU-seconds")
    shown.table("audit", text)
    if options.growths:
        text = reached(measured())
        print(f"\n{text}")
        shown.table("growths", text)
    wrong = [(name, difference) for name, one in found.items() for difference in one.unexplained]
    for name, difference in wrong:
        print(f"{name}: {difference}")
    sys.exit(1 if wrong else 0)


def audits(classes: bool) -> dict[str, Audit]:
    """Every model's audit, by its name."""
    import pico
    from auditing.audit import audit

    builders: dict[str, Callable[[], Any]] = dict(pico.PICO)
    if classes:
        import test_classes

        builders |= {name: _of_class(name) for name in test_classes.OTHERS}
    found = {}
    for done, (name, build) in enumerate(builders.items(), start=1):
        print(f"{done} of {len(builders)}: {name}", file=sys.stderr)
        found[name] = audit(build())
    return found


def _of_class(name: str) -> Callable[[], Any]:
    import transformers

    import pico
    import test_classes

    fields = test_classes.fields(name, test_classes.classes()[name])
    return lambda: pico.of_class(getattr(transformers, name), **fields)


def audited(found: dict[str, Audit]) -> str:
    """What was compared, and why table and trace differ where they do."""
    from auditing.explained import AGREED, LIMITS

    total = {
        name: sum(getattr(one, name) for one in found.values())
        for name in ("axes", "equal", "finer", "norms", "blocks")
    }
    families = len({one.model_type for one in found.values()})
    uses = collections.Counter(reason.name for one in found.values() for _, reason in one.explained)
    models = collections.Counter(
        name for one in found.values() for name in {reason.name for _, reason in one.explained}
    )
    unexplained = sum(len(one.unexplained) for one in found.values())
    lines = [
        f"{len(found)} models of {families} families: {total['axes']} axes of tensors, {total['norms']} norms, "
        f"{total['blocks']} blocks. Of {total['equal'] + total['finer']} spaces, {total['equal']} are one axis of the "
        f"trace and {total['finer']} are several, which the table lets grow together. {unexplained} differences "
        "without a reason.",
    ]
    for title, reasons in (("The same in other words", AGREED), ("What the trace cannot follow", LIMITS)):
        lines += ["", f"| {title} | models | differences |", "|---|---|---|"]
        lines += [f"| *{r.name}*: {r.says} | {models[r.name]} | {uses[r.name]} |" for r in reasons if uses[r.name]]
    return "\n".join(lines)


def measured() -> list[Growth]:
    """Every growth that a table allows, tried by inference."""
    from auditing.growths import growths, typical

    found = []
    for model_type, name in sorted(typical().items()):
        print(f"{model_type}: {name}", file=sys.stderr)
        found += growths(name)
    return found


def lines_of(model_types: set[str]) -> dict[str, int]:
    """The files in which only tables of these types are, with their lines."""
    from lemonx import architectures

    types: dict[str, set[str]] = collections.defaultdict(set)
    for model_type, family in architectures.families().items():
        types[inspect.getfile(family.build)].add(model_type)
    return {file: len(open(file).read().splitlines()) for file, inside in types.items() if inside <= model_types}


def reached(found: list[Growth]) -> str:
    """Which growths only a table has, and how many tables could go."""
    exact = [growth for growth in found if growth.table]
    only: dict[str, list[str]] = {growth.model_type: [] for growth in found}
    for growth in exact:
        if not growth.inferred:
            only[growth.model_type].append(growth.column)
    lines = [
        f"Inference reaches {sum(growth.inferred for growth in exact)} of the {len(exact)} growths that the tables of "
        f"{len(only)} families allow: {_could_go(only, set())}. If a vocabulary need not grow (what leaves a model "
        f"keeps its size): {_could_go(only, {'vocab'})}. If head width and vocabulary need not grow: "
        f"{_could_go(only, {'vocab', 'head_dim'})}.",
        "",
        "| family | what only its table can do |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {', '.join(columns) or 'nothing'} |" for name, columns in sorted(only.items())]
    return "\n".join(lines)


def _could_go(only: dict[str, list[str]], spared: set[str]) -> str:
    """How many families inference grows as their tables do, but for some columns, and which files hold no others."""
    equal = {name for name, columns in only.items() if set(columns) <= spared}
    files = lines_of(equal)
    return f"everything of {len(equal)} families, whose tables are {len(files)} files of {sum(files.values())} lines"


if __name__ == "__main__":
    main()
