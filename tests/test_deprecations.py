"""Warnings of what is about to be removed are errors in the tests."""

import warnings

import pytest

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("category", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_a_warning_of_a_removal_is_an_error(category):
    with pytest.raises(category, match="soon gone"):
        warnings.warn("soon gone", category, stacklevel=1)
