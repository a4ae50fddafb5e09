"""An inferred table for all sizes of a class: a spec whose sizes are expressions of config fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from lemonx.checkpoints.plain import JsonValue
from lemonx.errors import Refused
from lemonx.inference.disk import OnDisk
from lemonx.inference.expressions import Expression, constant, factor_expression, size_expression
from lemonx.inference.fields import DEPTH, Field, block_lists
from lemonx.inference.sampling import Samples
from lemonx.specs.config import TIED, Config, flat_fields
from lemonx.specs.norms import Norm
from lemonx.specs.rows import Row
from lemonx.specs.spaces import Space
from lemonx.specs.spec import Spec, Stack


@dataclass(frozen=True)
class SpaceForm:
    """A space of any size: as it was in the first run, and what its size and its scale are."""

    space: Space
    size: Expression
    scale: Expression

    def at(self, c: Config) -> Space:
        return replace(self.space, size=_whole(self.size.value(c.__getitem__)), scale=self.scale.value(c.__getitem__))


@dataclass(frozen=True)
class StackForm:
    """A stack of any depth."""

    stack: Stack
    size: Expression

    def at(self, c: Config) -> Stack:
        return replace(self.stack, size=_whole(self.size.value(c.__getitem__)))


@dataclass(frozen=True)
class Template:
    """An inferred table. `unsaid`: sizes that config.json leaves to its class, which a larger one's must say.

    `unknown`: sizes for which no expression was found, so that they stay what they are. `tied`: the config field that
    says whether a decoder is the embedding, if one is.
    """

    model_type: str
    model_class: str
    kind: str
    rows: Mapping[str, Row]
    spaces: Mapping[str, SpaceForm]
    fixed: Mapping[str, Expression]
    still: Mapping[str, str]
    acts: tuple[str, ...]
    shown: tuple[str, ...]
    mixed: tuple[str, ...]
    stacks: Mapping[str, StackForm]
    sizes: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, JsonValue]
    aliases: Mapping[str, str]
    follows: Mapping[str, str]
    unsaid: tuple[Field, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    tied: str = ""

    def build(self, c: Config) -> Spec:
        """Inferred from runs of its class."""
        return Spec(
            rows=self.rows if not self.tied or c[self.tied] else untied(self.rows),
            spaces={name: form.at(c) for name, form in self.spaces.items()},
            stacks={name: form.at(c) for name, form in self.stacks.items()},
            fixed={name: _whole(size.value(c.__getitem__)) for name, size in self.fixed.items()},
            still=self.still,
            acts=self.acts,
            shown=self.shown,
            mixed=self.mixed,
            config={one.name: c[one.name] or one.value for one in self.unsaid},
            follows=self.follows,
        )


def untied(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows with decoders that have weights of their own."""
    return {name: replace(row, tied=None) if getattr(row, "tied", None) else row for name, row in rows.items()}


def _whole(value: float) -> int:
    return int(value)


def template(
    samples: Samples,
    given: Mapping[str, JsonValue],
    read: Mapping[str, JsonValue],
    disk: OnDisk,
    kind: str,
    aliases: Mapping[str, str],
) -> Template:
    """The table for all sizes. `given`: config.json; `read`: as its class reads it; `disk`: rows as files name them."""
    return _Fitting(samples, given, read).template(disk.rows, disk.stacks, kind, aliases)


@dataclass
class _Fitting:
    """Finds expressions for what differs between the samples."""

    samples: Samples
    given: Mapping[str, JsonValue]
    read: Mapping[str, JsonValue]

    def __post_init__(self) -> None:
        said = flat_fields(self.given)
        self.flats = [flat_fields(sample.values) for sample in self.samples.samples]
        # Depths are not among them: the base has fewer blocks than config.json makes.
        widths = [one for one in self.samples.fields if one.option != DEPTH]
        self.nullable = frozenset(one.name for one in widths if said.get(one.name, 0) is None)
        self.unsaid = [one for one in widths if said.get(one.name) is None and one.index is None]
        self.unknown: dict[str, int] = {}
        # Fields that change alone before those that do not.
        self.fields = sorted(self.samples.fields, key=lambda one: one.name not in self.samples.alone)

    def template(
        self, rows: Mapping[str, Row], renamed: Mapping[str, str], kind: str, aliases: Mapping[str, str]
    ) -> Template:
        spec, said = self.samples.table.small, self.samples.base
        spaces = {name: self._space(name) for name in spec.spaces}
        stacks = {renamed.get(name, name): self._stack(name) for name in spec.stacks}
        fixed = {name: self._size(name, [s.spec.fixed[name] for s in self.samples.samples]) for name in spec.fixed}
        ties = any(getattr(row, "tied", None) for row in rows.values())
        used = self._used([*(form.size for form in spaces.values()), *(form.scale for form in spaces.values()),
                           *(form.size for form in stacks.values()), *fixed.values()])  # fmt: skip
        follows = {name: leader for name, leader in self._follows().items() if name not in used}
        return Template(
            model_type=str(said["model_type"]),
            model_class=str((self.given.get("architectures") or [""])[0]),  # type: ignore[index]
            kind=kind,
            rows=rows,
            spaces=spaces,
            fixed=fixed,
            still=spec.still,
            acts=spec.acts,
            shown=spec.shown,
            mixed=spec.mixed,
            stacks=stacks,
            sizes=self._options(used),
            defaults=self._defaults([*used, *follows, *eps_fields(rows)]),
            aliases=aliases,
            follows=follows,
            unsaid=tuple(one for one in self.unsaid if one.name in used),
            unknown=self.unknown,
            tied=TIED if ties and self.samples.base.get(TIED) is True else "",
        )

    def _size(self, name: str, sizes: list[int]) -> Expression:
        sampled = list(zip(self.flats, sizes, strict=True))
        found = size_expression(sampled, self.fields, self.nullable)
        if found is None:
            self.unknown[name] = sizes[0]
            return constant(sizes[0])
        return found

    def _space(self, name: str) -> SpaceForm:
        spaces = [sample.spec.spaces[name] for sample in self.samples.samples]
        first = spaces[0]
        for other in spaces:
            if _rest(first) != _rest(other):
                raise Refused(f"what {name} is depends on the sizes", "write a table for it")
        size = self._size(name, [space.size for space in spaces])
        scales = [(flat, space.scale) for flat, space in zip(self.flats, spaces, strict=True)]
        scale = factor_expression(scales, self.fields, self.nullable)
        if scale is None:
            raise Refused(
                f"{name} is multiplied by {scales[0][1]:.6g}, and how that follows from config.json cannot be told",
                "write a table for it",
            )
        return SpaceForm(first, size, scale)

    def _stack(self, name: str) -> StackForm:
        stacks = [sample.spec.stacks[name] for sample in self.samples.samples]
        depths = [one for one in self.fields if one.option == DEPTH]
        sampled = [(flat, stack.size) for flat, stack in zip(self.flats, stacks, strict=True)]
        size = size_expression(sampled, depths, self.nullable)
        if size is None:
            raise Refused(f"which field says how many blocks {name} has cannot be told", "write a table for it")
        deeper = next(stack for stack in stacks if stack.size != stacks[0].size)
        lists = tuple(other for one in size.fields for other in block_lists(self.samples.base, one))
        stack = replace(stacks[0], lists=lists, implied=bool(lists), still=deeper.still)
        return StackForm(stack, size)

    def _used(self, expressions: list[Expression]) -> list[str]:
        names = {one.name for expression in expressions for one in expression.fields}
        return [one.name for one in self.samples.fields if one.name in names]

    def _options(self, used: list[str]) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {}
        for one in self.samples.fields:
            if one.name not in used:
                continue
            key = one.option or one.name.replace(".", "_")
            if one.name not in found.setdefault(key, []):
                found[key].append(one.name)
        return {key: tuple(names) for key, names in found.items()}

    def _defaults(self, names: list[str]) -> dict[str, JsonValue]:
        """What the class makes of fields that config.json leaves out."""
        flat = flat_fields(self.read)
        return {name: flat[name] for name in [*names, TIED] if name in flat}

    def _follows(self) -> dict[str, str]:
        """Fields that were equal to another one and did not change without it."""
        alone, found = self.samples.alone, dict[str, str]()
        plain = [one for one in self.samples.fields if one.index is None and one.option != DEPTH]
        for one in plain:
            if one.name not in alone:
                like = [other for other in plain if other.name != one.name and other.value == one.value
                        and other.option == one.option and other.name not in found]  # fmt: skip
                if like:
                    found[one.name] = like[0].name
        return found


def eps_fields(rows: Mapping[str, Row]) -> list[str]:
    """The config fields that norms have their eps from."""
    return sorted({row.eps for row in rows.values() if isinstance(row, Norm) and isinstance(row.eps, str)})


def _rest(space: Space) -> list[tuple[str, object]]:
    """All of a space but its size and scale."""
    return [(one.name, getattr(space, one.name)) for one in fields(space) if one.name not in ("size", "scale")]
