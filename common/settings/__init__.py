"""Settings of all services. Each module is imported, because one environment may have settings of other commands."""

from common.settings import pod, gateway, up  # noqa: F401, I001 - in the order of docs/settings.md
