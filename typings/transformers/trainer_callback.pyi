from typing import Any

from transformers import TrainingArguments

class TrainerState:
    global_step: int
    total_flos: float
    log_history: list[dict[str, float]]

class TrainerControl:
    should_evaluate: bool
    should_save: bool
    should_log: bool

class TrainerCallback:
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> Any: ...

class PrinterCallback(TrainerCallback): ...
