"""What all sections of model.yaml have in common."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable, numbers are finite.

    Attributes:
        shorthand: The field that a bare text stands for, e.g. ``optimizer: adamw`` for
            ``optimizer: {name: adamw}``.
        exactly_one: Whether the fields are alternatives, of which one is given.
    """

    # What users hand on to others (a transformers configuration) may hold infinity, and must come back as it was.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    shorthand: ClassVar[str | None] = None
    exactly_one: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        if cls.shorthand is not None and isinstance(value, str):
            return {cls.shorthand: value}
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts ``True`` among the integers, and pydantic with it; a user who wrote ``true`` did not."""
        assert info.field_name is not None
        if _has_bool(value) and not _takes_bool(cls.model_fields[info.field_name].annotation):
            raise PydanticCustomError("bool_refused", "true and false are not allowed here")
        return value

    @model_validator(mode="after")
    def _one_alternative(self) -> Self:
        if type(self).exactly_one:
            names = list(type(self).model_fields)
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise ValueError(exactly_one_of(names, given))
        return self


def exactly_one_of(names: list[str], given: list[str]) -> str:
    """Say that one of ``names`` is wanted, where ``given`` holds none or several of them."""
    found = " and ".join(given) if given else "none of them"
    return f"takes exactly one of {', '.join(names)}; found {found}"


def section_class(annotation: Any) -> type[Section] | None:
    """The section that a field holds, through ``Optional`` and ``Annotated``; ``None`` for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (section_class(arg) for arg in get_args(annotation))
    return next((section for section in found if section is not None), None)


def child_section(section: type[Section], name: object) -> type[Section] | None:
    """The section under key ``name`` of ``section``, if there is one."""
    field = section.model_fields.get(name) if isinstance(name, str) else None
    return section_class(field.annotation) if field is not None else None


def _has_bool(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(item, bool) for item in items)


def _takes_bool(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return any(isinstance(choice, bool) for choice in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return True  # the section says itself what it takes
    return annotation in (bool, Any) or any(_takes_bool(arg) for arg in get_args(annotation))
