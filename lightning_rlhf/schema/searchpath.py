"""Configuration folders of other installed packages: entry point group ``lightning_rlhf.configs``."""

from __future__ import annotations

from importlib.metadata import entry_points

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUP = "lightning_rlhf.configs"


class EntryPointSearchPath(SearchPathPlugin):
    """Adds every package with an entry point in ``[project.entry-points."lightning_rlhf.configs"]``.

    The value names a package with YAML files in group folders, such as ``my_package.conf``. The kit's own
    configuration is searched first, so a package adds options and does not replace them.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for entry in entry_points(group=GROUP):
            search_path.append(f"{GROUP}:{entry.name}", f"pkg://{entry.value}")


def register() -> None:
    """Register :class:`EntryPointSearchPath` with Hydra; call it before ``hydra.main``. Repeated calls are harmless."""
    plugins = Plugins.instance()
    if EntryPointSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(EntryPointSearchPath)
