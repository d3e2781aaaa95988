"""`concord chaos`: parts of a running site are killed, frozen and slowed while pairs go through it, then the books are
checked: docs/chaos.md."""
