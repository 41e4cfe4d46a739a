"""`python -m meshwright` is the same as `meshwright`."""

from meshwright.cli.main import entry

entry()
