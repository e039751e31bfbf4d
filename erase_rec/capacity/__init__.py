"""What a training takes on machines that are not there: memory, bytes on the network and time of a step."""
