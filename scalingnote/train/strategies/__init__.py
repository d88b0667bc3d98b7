"""How a module is spread over ranks: ddp, fsdp2 and deepspeed behind one small protocol."""
