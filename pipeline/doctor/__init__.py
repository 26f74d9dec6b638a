"""`quantgate doctor`: can this machine run a profile, and is the user's own input in order? Nothing is started.

Every check is a small function that returns what it found or raises what a stage would raise; none of them hides a later one.
"""

from pipeline.doctor.check import Check, verdict
from pipeline.doctor.examine import examine

__all__ = ["Check", "examine", "verdict"]
