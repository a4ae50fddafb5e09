"""One training run: from a recipe to a folder with the model, its curve and what it cost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemonx import api
from lemonx.checkpoints import Checkpoint
from lemonx.checkpoints.creating import new_folder, remove, write_whole
from lemonx.checkpoints.folder import RUN
from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import BadRecipe
from lemonx.execution.sidecar_files import carried
from lemonx.models.foreign import in_one_line, quiet
from lemonx.planning.plan import Plan
from lemonx.training import curve as curves
from lemonx.verification.certificate import KEY, versions
from lemonx_lab import data
from lemonx_lab.training import model, run_folder
from lemonx_lab.training.inheritance import EARLY
from lemonx_lab.training.recipe import Recipe
from lemonx_lab.training.requirements import require
from lemonx_lab.training.run_folder import Saved
from lemonx_lab.training.stages import Leg, grow, keep_ramp, legs, ramp_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lemonx.training.kept import KeepSource, SourceEntries
    from lemonx.training.ramp import RampCallback
    from lemonx_lab.training.trainer import LemonTrainer

TellProgress = Callable[[int, int, Mapping[str, float]], None]
# How often a run looks at itself if the recipe does not say.
_EVALUATIONS, _SAVES = 20, 10


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: `final` is the last row of `curve` that has a validation loss; `notes` are for its user."""

    output: Path
    curve: list[curves.CurveRow]
    final: curves.CurveRow
    seconds: float
    flops: float
    stages: tuple[curves.Phase, ...]
    notes: tuple[str, ...] = ()


def run(
    recipe: Recipe,
    output: str | Path,
    *,
    resume: bool = True,
    force: bool = False,
    progress: TellProgress | None = None,
) -> FinishedRun:
    """Train as the recipe says and leave a checkpoint in `output`; an unfinished run of the same recipe continues.

    `progress(step, total, figures)` is called after every step, and with figures after every evaluation.
    """
    require(more=recipe.report_to)
    job = _kind(recipe)(recipe, Path(output), _prepared(recipe), progress)
    with job.claimed(resume=resume, force=force), quiet():
        return job.run()


def _kind(recipe: Recipe) -> type[TrainingJob]:
    """The kind of job: under torchrun with several processes, they share the model."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return TrainingJob
    if recipe.train == "new" or recipe.beside or recipe.lora or recipe.optimizer.kind == "muon":
        raise BadRecipe("`train: new`, `beside`, `lora` and muon are for one process", "start it without torchrun")
    from lemonx_lab.training.sharded_run import SharedJob

    return SharedJob


def _prepared(recipe: Recipe, section: Mapping[str, JsonValue] | None = None) -> data.Prepared:
    """The examples of the recipe's data, or of another section."""
    asked = recipe.data if section is None else section
    if recipe.source is None:
        return data.prepare(recipe.task, asked, config=recipe.config, seed=recipe.seed)
    with Checkpoint.open(recipe.source) as source:
        return data.prepare(recipe.task, asked, config=source.config, seed=recipe.seed, folder=source.path)


class TrainingJob:
    """A run: the parts that its stages share."""

    def __init__(self, recipe: Recipe, output: Path, prepared: data.Prepared, progress: TellProgress | None) -> None:
        self.recipe, self.output, self.data, self.progress = recipe, output, prepared, progress
        self.schedule = recipe.schedule(len(prepared.train))
        total = self.schedule.total
        self.legs = legs(recipe, total)
        self.evaluate = recipe.eval_every or -(-total // _EVALUATIONS)
        self.save = -(-total // _SAVES) if recipe.save_every is None and recipe.lora is None else recipe.save_every or 0
        self.beside = {name: _prepared(recipe, section) for name, section in recipe.beside.items()}
        self._entries: SourceEntries | None = None

    def claimed(self, *, resume: bool, force: bool) -> AbstractContextManager[None]:
        """The output folder, as this run's."""
        return run_folder.claimed(self.output, self.recipe, resume=resume, force=force)

    def run(self) -> FinishedRun:
        saved = run_folder.last_saved(self.output, {leg.stage: leg.end for leg in self.legs})
        history: list[curves.CurveRow] = saved.history if saved else []
        trained = None
        for leg in self.legs[saved.stage if saved else 0 :]:
            if saved is not None and saved.stage < leg.stage:
                saved = self._grown(saved, leg)
            trained = self._loaded(saved.path, {}) if saved else self._start()
            if saved is None or saved.step < leg.end:
                history = self._train(leg, trained, saved, history)
                saved = run_folder.last_saved(self.output, {leg.stage: leg.end for leg in self.legs})
        assert trained is not None
        return self._finish(trained, history)

    def _start(self) -> PreTrainedModel:
        """The model before its first step."""
        recipe = self.recipe
        if recipe.config is not None:
            return model.fresh(recipe.task, recipe.config, self.data.model, recipe.seed)
        assert recipe.source is not None
        source, leg = Path(recipe.source), self.legs[0]
        return self._begun(source) if leg.expand is None else self._expanded(source, leg)

    def _begun(self, source: Path) -> PreTrainedModel:
        self._bring_along(source)
        if self.legs[0].ramp is not None:
            keep_ramp(self.legs[0], source, self.output)
        if self.recipe.train == "new":
            from lemonx.training.kept import SourceEntries

            # Read again: a run that was stopped before its first checkpoint may have begun with another growth.
            self._entries = SourceEntries(source)
            run_folder.remember(self.output, KEY, dict(self._entries.record))
        return self._loaded(source, self.data.model)

    def _keep(self, trained: PreTrainedModel, saved: Saved | None) -> KeepSource | None:
        """The callback that keeps the source's numbers in the model, if only added entries are trained."""
        if self.recipe.train != "new":
            return None
        from lemonx.training.kept import KeepSource, SourceEntries

        if self._entries is None:
            assert saved is not None
            known = run_folder.remembered(self.output, KEY)
            self._entries = SourceEntries(saved.path, known if isinstance(known, dict) else None)
        return KeepSource(trained, self._entries)

    def _expanded(self, source: Path, leg: Leg) -> PreTrainedModel:
        target = self.output / ".expanded"
        remove(target)
        api.expand(source, target, **leg.options)
        found = self._begun(target)
        remove(target)
        return found

    def _bring_along(self, source: Path, expansion: Plan | None = None) -> None:
        """Copy the tokenizer and similar files, as an expansion would write them."""
        with Checkpoint.open(source) as checkpoint:
            run_folder.bring_along(self.output, carried(checkpoint, expansion))

    def _loaded(self, source: Path, decided: Mapping[str, Any]) -> PreTrainedModel:
        return model.loaded(self.recipe.task, source, decided, self.recipe.seed)

    def _grown(self, saved: Saved, leg: Leg) -> Saved:
        return grow(saved, leg, self.output)

    def _train(
        self, leg: Leg, trained: PreTrainedModel, saved: Saved | None, history: list[curves.CurveRow]
    ) -> list[curves.CurveRow]:
        from lemonx_lab.training.adapters import adapted
        from lemonx_lab.training.trainer import Rhythm, arguments

        # A grown model is evaluated before it trains, as every model is.
        fresh = saved is None or saved.step == leg.start
        args, ramp = arguments(self.recipe, self.output, end=leg.end, fresh=fresh), self._ramp(leg)
        keep = self._keep(trained, saved)
        # Examples meet the model here: this is where a misfit shows.
        with (
            in_one_line("train this model on this data", "give others", BadRecipe, but=(OSError,)),
            adapted(trained, self.recipe.lora),
        ):
            trainer = self._trainer()(
                trained,
                args,
                self.recipe,
                self.data,
                self.schedule,
                teacher=self._teacher(),
                beside=self.beside,
                seconds=max((line["seconds"] for line in history), default=0.0),
            )
            for support in (ramp, keep):
                if support is not None:
                    trainer.add_callback(support)
            trainer.add_callback(Rhythm(self.evaluate, self.save, leg.end, self.schedule.total, self._tell))
            trainer.train(resume_from_checkpoint=str(saved.path) if saved else None)
        return trainer.state.log_history

    def _ramp(self, leg: Leg) -> RampCallback | None:
        """The callback that opens the blocks which were added at the beginning of this stage."""
        if leg.ramp is None:
            return None
        from lemonx.training.ramp import RampCallback

        return RampCallback(ramp_of(leg, self.output), leg.ramp, start=leg.start)

    def _trainer(self) -> type[LemonTrainer]:
        from lemonx_lab.training.trainer import LemonTrainer

        return LemonTrainer

    def _tell(self, step: int, history: list[curves.CurveRow], figures: Mapping[str, float]) -> None:
        if figures:
            write_whole(self.output / run_folder.CURVE, curves.csv_text(curves.rows(history)))
        if self.progress is not None:
            self.progress(step, self.schedule.total, figures)

    def _teacher(self) -> PreTrainedModel | None:
        asked = self.recipe.inheritance
        if asked is None:
            return None
        if asked.kind != EARLY and self.data.model.get("num_labels") == 1:
            raise BadRecipe(
                f"inheritance {asked.kind} needs classes to predict, and this task predicts a number",
                f"use kind {EARLY}, or remove inheritance from the recipe",
            )
        return model.loaded(self.recipe.task, Path(asked.teacher or self.recipe.source or ""), self.data.model)

    def _finish(self, trained: PreTrainedModel, history: list[curves.CurveRow]) -> FinishedRun:
        partial = self.output / ".model"
        self._save(trained, partial)
        curve = curves.rows(history)
        final = [row for row in curve if "validation_loss" in row][-1]
        stages = curves.phases(curve, [leg.end for leg in self.legs])
        done = FinishedRun(
            self.output, curve, final, final["seconds"], final["flops"], stages, tuple(self._notes())
        )  # fmt: skip
        self._publish(trained, partial, done)
        return done

    def _notes(self) -> Iterator[str]:
        if self.recipe.loop is not None:
            yield "the key loop has no effect: there is one loop now; leave it out"
        asked, given = self.recipe.warmup_steps(len(self.data.train)), self.schedule
        if given.warmup < asked:
            yield f"the warm-up of {asked} steps does not fit into a run of {given.total}: it had {given.warmup}"
        kept = [path for path in run_folder.saved_folders(self.output) if path.name.startswith("checkpoint")]
        if kept:
            yield (
                f"the last checkpoint, with the optimizer's state, is kept as {kept[-1]}: remove it if you do not need "
                "it (save_every: 0 saves none)"
            )

    def _save(self, trained: PreTrainedModel, partial: Path) -> None:
        trained.save_pretrained(new_folder(partial))

    def _publish(self, trained: PreTrainedModel, partial: Path, done: FinishedRun) -> None:
        # config.json last: a folder with it is a checkpoint.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, self.output / path.name)
        for other in (
            partial,
            *(ramp_of(leg, self.output) for leg in self.legs),
            *(path for path in run_folder.saved_folders(self.output) if path.name.startswith("stage")),
        ):
            remove(other)
        write_whole(self.output / run_folder.CURVE, curves.csv_text(done.curve))
        write_whole(self.output / run_folder.PICTURE, curves.picture(done.curve))
        write_whole(self.output / RUN, json.dumps(self._account(trained, done), indent=2) + "\n")

    def _account(self, trained: PreTrainedModel, done: FinishedRun) -> dict[str, JsonValue]:
        grown = run_folder.remembered(self.output, KEY)
        return {
            "lemonx": versions()["lemonx"],
            "finished": True,
            "recipe": self.recipe.as_dict(),
            "seed": self.recipe.seed,
            "versions": versions(),
            "data": {"digest": self.data.digest, "examples": len(self.data.train)},
            "parameters": trained.num_parameters(),
            "steps": self.schedule.total,
            "warmup": self.schedule.warmup,
            "flops": done.flops,
            "seconds": done.seconds,
            "stages": [asdict(stage) for stage in done.stages],
            "final": done.final,
            "files": run_folder.brought_along(self.output),
            **({} if grown is None else {KEY: grown}),
        }
