"Write the tables of data/ as they are written now, with unchanged values, and the README and record of all its files."
import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from stocker.market.data import read_table, write_table
from stocker.trading.dataset import write_record

DATA = Path(__file__).resolve().parent.parent/'data'

for path in sorted(DATA.glob('*.parquet')):
    before = read_table(path)
    write_table(before, path)
    pd.testing.assert_frame_equal(read_table(path), before, check_exact=True)
record = json.loads((DATA/'manifest.json').read_text(encoding='utf-8'))
write_record(DATA, SimpleNamespace(name=record['source'], adjustment=record['adjustment']))
print(f'the record of {DATA} names {len(json.loads((DATA / "manifest.json").read_text())["files"])} files')
