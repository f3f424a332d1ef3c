"""The database of runs. The driver of a run is the only one who writes.

Its parts are imported from their own modules, because :mod:`zerotune.store.store` brings SQLAlchemy along and
:mod:`zerotune.store.location` does not.
"""
