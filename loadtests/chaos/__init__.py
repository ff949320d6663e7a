"""Faults on a whole local run of real parts: processes killed and stopped at observed points, connections cut, files torn.

`python -m loadtests.chaos --minutes N --seed S --json OUT`; what is promised, and how it is checked, stands in
`docs/reliability.md`. The short selection in `tests/faults` uses the same parts.
"""
