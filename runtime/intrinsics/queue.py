"""The queue of a grid's tasks: an int64 array that compiled functions change atomically (see `tasks`).

NEXT task, END of the tasks, STEP: how many are taken at once (0: nothing is shared), and, in a cache line of its own, how
many are DONE. LEFT is not theirs: how many threads that helped have let go of the arguments.
"""

NEXT, END, STEP, DONE, LEFT = 0, 1, 2, 8, 9
LENGTH = 16
