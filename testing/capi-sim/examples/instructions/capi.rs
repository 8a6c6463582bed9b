//! A launch by the C ABI, and the same by Rust.

mod idle;
mod program;

use leasehold::{Buffer, Error, Grid, KernelBase, Lease, Result, Runtime, View};
use leasehold_capi::extend::Lent;
use leasehold_capi::ffi::{
    LEASEHOLD_READ, LEASEHOLD_WRITE, LeaseholdGrid, LeaseholdOperand, leasehold_stream_launch,
};
use std::ptr::null_mut;

const PARAMS: [u32; 4] = [0; 4];

struct Bench {
    runtime: Runtime,
    kernel: KernelBase,
    buffers: [Lease<Buffer>; 3],
    /// The stream and the kernel, for C.
    stream: Lent,
    lent_kernel: Lent,
    _lent_buffers: Vec<Lent>,
    operands: [LeaseholdOperand; 3],
}

impl Bench {
    fn new() -> Result<Self> {
        let runtime = idle::runtime()?;
        let kernel = idle::kernel()?;
        let buffers = [runtime.alloc(4096)?, runtime.alloc(4096)?, runtime.alloc(4096)?];
        let lent = buffers.iter().map(Lent::buffer).collect::<Result<Vec<_>>>()?;
        let operands = [0, 1, 2].map(|i| LeaseholdOperand {
            buffer: lent[i].handle(),
            offset: 0,
            bytes: 4096,
            access: if i < 2 { LEASEHOLD_READ } else { LEASEHOLD_WRITE },
            reserved: 0,
        });
        Ok(Self {
            stream: Lent::stream(runtime.stream())?,
            lent_kernel: Lent::kernel(&kernel)?,
            _lent_buffers: lent,
            operands,
            buffers,
            kernel,
            runtime,
        })
    }

    fn by_rust(&self) -> Result<()> {
        let [a, b, c] = &self.buffers;
        let operands = [a.read(), b.read(), c.write()];
        let grid = Grid::new([8, 1, 1]).threads([64, 1, 1]);
        self.runtime.stream().launch(&self.kernel, &operands, &PARAMS, grid)
    }

    fn by_c(&self) -> Result<()> {
        let grid =
            LeaseholdGrid { blocks: [8, 1, 1], threads: [64, 1, 1], shared_bytes: 0, reserved: 0 };
        // SAFETY: the lists are borrowed for the call.
        let status = unsafe {
            leasehold_stream_launch(
                self.stream.handle(),
                self.lent_kernel.handle(),
                &grid,
                self.operands.as_ptr(),
                self.operands.len(),
                PARAMS.as_ptr().cast(),
                size_of_val(&PARAMS),
                null_mut(),
            )
        };
        if status == 0 { Ok(()) } else { Err(Error::other(format!("status {status}"))) }
    }
}

/// The paths, by the names of the table.
const PATHS: [program::Path<Bench>; 2] =
    [("rust_launch", Bench::by_rust), ("capi_launch", Bench::by_c)];

fn main() -> Result<()> {
    program::run(Bench::new, &PATHS)
}
