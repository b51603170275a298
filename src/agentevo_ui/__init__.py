"""The dashboard in the browser: `agentevo ui`. It reads runs and stores. With --control it also
loads checkpoints for visitors who try them, and sends runs requests to stop, save, pause or resume.

server.py    listens, prints the URL, ends on a signal
access.py    who may see anything, and who may change anything: tokens, cookies, host
app.py       assembles the pages
stores.py    opens each store once
run_watcher.py  the state of each run, kept up to date while a page is open
live.py      server-sent events
index/       the attempts of a store in a file and in memory, for searching and sorting
players.py   processes that hold a checkpoint each, for visitors who try a run
context.py   helpers of the pages' handlers
*_page.py    one page each, with its own router
"""
