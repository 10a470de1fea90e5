"""The queue of a grid's tasks: an int64 array that compiled functions change atomically (see `tasks`), and what the threads
that may help need to know.

NEXT task, END of the tasks, STEP: how many are taken at once (0: nothing is shared). GIVE is the address of the function
that calls helpers (`waiting.give`), 0 once they are called or where there are none, FIRST that of the first one's mailbox.
The caller's compiled function leaves for them the address of what they RUN and, from ARGUMENTS on, its arguments, a word
each; and the MODE of its processor's floating-point unit, so that all tasks round and flush alike. A helper that fails
leaves STATUS and REASON, as Numba's functions return them.
"""

NEXT, END, STEP, GIVE, FIRST, RUN, STATUS, REASON, MODE = range(9)
ARGUMENTS = 16
LENGTH = 512
