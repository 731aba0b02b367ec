"""The device of a process: where its tensors live, and in what order work on them is done.

On the CPU work is done when a call returns.  On a GPU it is queued, and a rank's program is the
order of one stream, on which all of its stages compute.  What goes on beside that (copies between
the memory of device and host) begins after what the stream had queued when its instruction came,
and ends before what is queued after the instruction that waits for it.  So what a program is
proved to do in its order is done in that order on the device, and nothing but copies has to say
for what it waits.
"""
