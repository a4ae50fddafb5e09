"""Verify a checkpoint against the one it came from, from the two folders alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lemonx.checkpoints.adapters import Adapter
from lemonx.checkpoints.finding import is_run
from lemonx.checkpoints.folder import ADAPTER_FOLDER, is_adapter
from lemonx.models.sources import open_pair, open_source
from lemonx.options.declared import Verifying
from lemonx.verification.certificate import read_certificate
from lemonx.verification.fitting import require_fitting
from lemonx.verification.verify import Verified, compare_outputs, measure
from lemonx.workflows.adapters import GrowingAdapter
from lemonx.workflows.planning import plan_again
from lemonx.workflows.tables import table_for


def verify_folders(source: Path, target: Path, options: Verifying) -> Verified:
    """Check everything that the certificate makes checkable; without a certificate, only the outputs."""
    adapter, allow_pickle = options.adapter, options.pickled
    beside = (adapter is not None or is_adapter(source)) and is_adapter(target / ADAPTER_FOLDER)
    kept: Adapter | None = None
    if beside:  # it was grown along, not merged
        opened, kept = open_pair(source, adapter, allow_pickle=allow_pickle)
    else:
        run = target.is_dir() and is_run(target)
        opened = open_source(source, allow_pickle=allow_pickle, adapter=adapter, config=options.config, run=run)
    with opened as small, open_source(target, allow_pickle=bool(allow_pickle)) as large:
        said = read_certificate(large)
        require_fitting(small)
        require_fitting(large)
        if said is None:
            outputs, layers = compare_outputs(small, large, None, by_layer=options.layerwise)
            why = "the target has no lemonx.json, so only outputs could be compared"
            return Verified(outputs, layers=layers, skipped=why)
        with table_for(small, options):
            plan = plan_again(small, large, said)
            verified = measure(plan, small, large, by_layer=options.layerwise)
            if kept is None:
                return verified
            with GrowingAdapter(kept, small, plan, target) as follows:
                return replace(verified, adapter=follows.measured(large, outputs=verified.passed))
