"""The dashboard in the browser: `agentevo ui`. It reads runs and stores; with --control it loads
checkpoints for visitors who try them, and asks runs to stop, save, pause or resume.

server.py    listens, prints the URL, ends on a signal
access.py    who may see anything, and who may change anything: tokens, cookies, host
forms.py     the one kind of request by which a visitor does more than look
app.py       puts the pages together
sources.py   which runs and stores there are, and their stores, opened once
watching.py  what is known of each run, kept up to date while a page is open
live.py      server-sent events
index/       the attempts of a store, to be searched and sorted
players.py   processes that hold a checkpoint each, for visitors who try a run
context.py   what a page's handler needs
*_page.py    one page each, with a router of its own
"""
