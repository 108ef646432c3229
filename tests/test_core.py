"What all parts use: where files are kept."
from pathlib import Path

import pytest

from stocker.market import core


@pytest.mark.parametrize(('platform', 'variables', 'expected'), [
    ('linux', {'XDG_CACHE_HOME': '/x'}, '/x/stocker'), ('linux', {}, '~/.cache/stocker'),
    ('darwin', {}, '~/Library/Caches/stocker'), ('win32', {'LOCALAPPDATA': '/l'}, '/l/stocker/cache'),
    ('linux', {'STOCKER_CACHE': '/own'}, '/own')])
def test_the_cache_folder_is_where_the_system_keeps_such_files(monkeypatch, platform, variables, expected):
    for name in ('STOCKER_CACHE', 'XDG_CACHE_HOME', 'LOCALAPPDATA'): monkeypatch.delenv(name, raising=False)
    for name, value in variables.items(): monkeypatch.setenv(name, value)
    monkeypatch.setattr(core.sys, 'platform', platform)
    assert core.cache_folder() == Path(expected).expanduser()
