"""Prints the coefficients of the normal distribution function in csrc/cpu/core/elementary.h.

For a >= 0 write  Phi(-a) = exp(-a^2/2) m(a).  With t = (a - 4)/(a + 4) the function
(a + 4) m(a) is smooth in t on [-1, 1); its interpolation at the Chebyshev points of the
range 0 <= a <= limit is within a small factor of the best polynomial. The last line
printed is the largest relative error on a grid.

    pip install mpmath && python tools/fit_normal_cdf.py --limit 14 --degree 9
"""

import argparse

from mpmath import cos, erfc, exp, linspace, lu_solve, matrix, mp, mpf, pi, polyval, sqrt

CENTRE = 4


def target(t: mpf) -> mpf:
    a = CENTRE * (1 + t) / (1 - t)
    return (a + CENTRE) * exp(a * a / 2) * erfc(a / sqrt(mpf(2))) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--degree", type=int, required=True)
    args = parser.parse_args()
    mp.dps = 50

    low, high, n = mpf(-1), mpf(args.limit - CENTRE) / mpf(args.limit + CENTRE), args.degree + 1
    nodes = [
        (high + low) / 2 + (high - low) / 2 * cos(pi * (2 * i + 1) / (2 * n)) for i in range(n)
    ]
    vandermonde = matrix([[t**j for j in range(n)] for t in nodes])
    coefficients = list(lu_solve(vandermonde, matrix([target(t) for t in nodes])))
    for c in coefficients:
        print(mp.nstr(c, 18))
    grid = linspace(low, high, 1000)
    error = max(abs(polyval(coefficients[::-1], t) / target(t) - 1) for t in grid)
    print("# relative error", mp.nstr(error, 3))


if __name__ == "__main__":
    main()
