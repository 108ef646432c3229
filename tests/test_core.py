"What all parts use: where files are kept, what they are called, how a value is quoted."
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


@pytest.mark.parametrize('ticker', [
    'PRN', 'CON', 'CON.DE', 'NUL', 'COM1', 'LPT9.L', 'AAPL', 'GC=F', '^GSPC', 'BRK-B', '7203.T'])
def test_a_ticker_is_found_again_behind_its_file_name(ticker):
    stem = core.file_stem(ticker)
    assert core.stem_ticker(stem) == ticker and stem.split('.')[0].lower() not in core.RESERVED


@pytest.mark.parametrize('thing', [None, 5, 10**5000, [['deep'] * 99] * 99, 'x' * 10**6, '\ud800\n'], ids=range(6))
def test_a_quotation_has_one_line_and_a_longest_length(thing):
    assert len(core.excerpt(thing)) <= core.LONGEST_EXCERPT and '\n' not in core.excerpt(thing)
    with pytest.raises(core.StockerError, match='is not a ticker') as caught: core.file_stem(thing)
    assert len(str(caught.value)) < 200
