"""Composing configs for tests: the same files are read and merged once, as they are in Hydra."""

import copy

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides

_lists = {}
_merged = {}
_create_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list


def compose_files_once():
    """Let Hydra keep what it has merged of our own files; values are set on a copy."""
    config_loader_impl.create_defaults_list = _listed_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged_once


def _listed_once(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    arguments = prepend_hydra, skip_missing
    values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    set_on_copy = {id(override) for override in values}
    files = tuple(o.input_line for o in overrides_list if id(o) not in set_on_copy)
    if any(override.key_or_group == "hydra.searchpath" for override in values):
        # A test's own files change from one test to the next.
        return _create_list(repo, config_name, overrides_list, *arguments)
    key = config_name, files, *arguments
    if key not in _lists:
        _lists[key] = _create_list(repo, config_name, overrides_list, *arguments)
    found = _lists[key]
    _merged.setdefault(id(found.defaults), None)
    return DefaultsList(
        defaults=found.defaults,
        defaults_tree=found.defaults_tree,
        config_overrides=values,
        overrides=found.overrides,
    )


def _merged_once(self, defaults, repo):
    if id(defaults) not in _merged:
        return _merge(self, defaults, repo)
    if _merged[id(defaults)] is None:
        _merged[id(defaults)] = _merge(self, defaults, repo)
    return copy.deepcopy(_merged[id(defaults)])
