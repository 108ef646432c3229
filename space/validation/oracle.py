"Play the orders of the optimum on a running server: python oracle.py http://127.0.0.1:8000"
import sys

from stocker.serving.client import HERE
from stocker.serving.trials import oracle_max

check = oracle_max(sys.argv[1] if len(sys.argv) > 1 else HERE)
print(check.measured)
sys.exit(0 if check.passed else 1)
