"""Prints the coefficients of the hyperbolic tangent in csrc/cpu/core/elementary.h.

    tanh x ~ x P(x^2) / Q(x^2),  Q(0) = 1,  for |x| <= limit

with the largest relative error nearly as small as it can be. Points whose error is large gain
weight (Lawson's iteration) while the linearized problem  P - Q tanh(x)/x = 0, divided by the last
Q, is solved again and again. The last line printed is the largest relative error.

    pip install numpy && python tools/fit_tanh.py --limit 9.01 --degree 4
"""

import argparse

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--degree", type=int, required=True, help="of P and of Q, in x^2")
    args = parser.parse_args()

    points, terms = 600, args.degree + 1
    x = args.limit * (1 - np.cos(np.pi * (np.arange(points) + 0.5) / points)) / 2
    target = np.tanh(x) / x
    powers = np.vander((x / args.limit) ** 2, terms, increasing=True)
    weights, denominator = np.ones(points), np.ones(points)
    best, p, q = np.inf, np.empty(0), np.empty(0)
    for _ in range(4000):
        scale = np.sqrt(weights) / (target * denominator)
        matrix = np.hstack([powers, -target[:, None] * powers[:, 1:]]) * scale[:, None]
        sizes = np.linalg.norm(matrix, axis=0)
        solution = np.linalg.lstsq(matrix / sizes, target * scale, rcond=None)[0] / sizes
        numerator, denominator = solution[:terms], np.r_[1, solution[terms:]]
        candidate = numerator, denominator
        denominator = powers @ denominator
        error = np.abs(powers @ numerator / denominator / target - 1)
        if error.max() < best:
            best, (p, q) = error.max(), candidate
        weights = np.maximum(weights * error / (weights * error).sum(), 1e-12)
    scale = args.limit ** (-2.0 * np.arange(terms))
    for name, coefficients in (("P", p * scale), ("Q", q * scale)):
        print(name, *(f"{c:.9e}" for c in coefficients))
    print(f"# relative error {best:.2e}")


if __name__ == "__main__":
    main()
