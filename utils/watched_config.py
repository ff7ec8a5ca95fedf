"""Tracks which config fields model.py and dataset.py read: a field that is set but not read has no effect."""

from __future__ import annotations

import dataclasses
from typing import Any

from config import TrainingConfig, UserError, fields_of_yours, type_of


class WatchedConfig(TrainingConfig):
    """A config for model.py and dataset.py that records which fields they read."""

    @classmethod
    def of(cls, config: TrainingConfig, read: set[str] | None = None) -> WatchedConfig:
        watched = object.__new__(cls)
        vars(watched).update(vars(config), _read=set() if read is None else read)
        return watched

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in values and name != "_read":
            values["_read"].add(name)
        return object.__getattribute__(self, name)

    def plain(self) -> TrainingConfig:
        """The config without tracking, for the template's own files."""
        return TrainingConfig(**{name: value for name, value in vars(self).items() if name != "_read"})

    def with_auto(self, dataset: Any) -> WatchedConfig:
        """Replace "auto" in fields of the model and data by the training set's attributes of the same names."""
        names = [field.name for field in fields_of_yours() if vars(self)[field.name] == "auto" and type_of(field)[1]]
        found = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
        return WatchedConfig.of(dataclasses.replace(self.plain(), **found), self._read | found.keys())

    def require_read(self) -> None:
        """Raises UserError if a field of the model or data was set but neither model.py nor dataset.py read it."""
        for field in fields_of_yours():
            value = vars(self)[field.name]
            if value != field.default and field.name not in self._read:
                raise UserError(
                    f"{field.name}={value}: neither model.py nor dataset.py reads it, so it would have no effect; leave"
                    f" it out, or use config.{field.name} there"
                )
