"""What runs the graphs: one file each, behind one protocol."""
