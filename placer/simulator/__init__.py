"""A plan judged by a log: every lookup counted, no weight touched.

No solver has a part in it, and no other module of the project is told what it finds.
"""
