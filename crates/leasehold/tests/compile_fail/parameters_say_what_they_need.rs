//! A tuple and a struct without derives are refused with the derives' names.
#![forbid(unsafe_code)]

use leasehold::kernel::CpuArgs;
use leasehold::{KernelBase, Operand, Result, Stream};

#[derive(Clone, Copy)]
#[repr(C)]
struct Scale {
    by: f32,
    count: u32,
}

fn tile(args: &CpuArgs<'_>) -> f32 {
    let params: Scale = args.params();
    params.by * params.count as f32
}

fn launches(stream: &Stream, kernel: &KernelBase, operands: &[Operand<'_>]) -> Result<()> {
    stream.launch(kernel, operands, &Scale { by: 2.0, count: 1 }, [1, 1, 1])?;
    stream.launch(kernel, operands, &(2.0f32, 1u32), [1, 1, 1])?;
    Ok(())
}

fn main() {}
