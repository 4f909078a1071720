"""These tests need what `make test-plugins` installs in a folder of its own."""

from importlib.util import find_spec

import hydra_plugins  # a namespace, which holds our own as well

PLUGINS = ("joblib_launcher", "optuna_sweeper")
names = ["submitit", *(f"{hydra_plugins.__name__}.hydra_{plugin}" for plugin in PLUGINS)]
collect_ignore = [] if all(find_spec(name) for name in names) else ["test_plugins.py"]
