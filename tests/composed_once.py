"""Composing configs for tests: the same files are read and merged once, as they are in Hydra."""

import pickle

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import OmegaConf

_lists = {}
_merged = {}
_create_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_find_folders = ConfigLoaderImpl._process_config_searchpath


def compose_files_once():
    """Let Hydra keep what it has merged of our own files; values are set on a copy."""
    config_loader_impl.create_defaults_list = _listed_once
    ConfigLoaderImpl._compose_config_from_defaults_list = _merged_once
    ConfigLoaderImpl._process_config_searchpath = _folders_if_named


def _has_own_files(overrides):
    """Whether there are files of a test's own, which change from one test to the next."""
    return any(override.key_or_group == "hydra.searchpath" for override in overrides)


def _folders_if_named(self, config_name, parsed_overrides, repo):
    """Our own config names no folders, and need not be read to see that."""
    if _has_own_files(parsed_overrides):
        _find_folders(self, config_name, parsed_overrides, repo)


def _listed_once(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    arguments = prepend_hydra, skip_missing
    values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    set_on_copy = {id(override) for override in values}
    files = tuple(o.input_line for o in overrides_list if id(o) not in set_on_copy)
    if _has_own_files(values):
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
        _merged[id(defaults)] = pickle.dumps(_merge(self, defaults, repo))
    copy = pickle.loads(_merged[id(defaults)])
    # The time of a run is that of its own composition.
    OmegaConf.clear_cache(copy)
    return copy
