//! The source of a device's memory takes no addresses from safe code.
#![forbid(unsafe_code)]

use leasehold::{MemoryKind, Runtime};

fn misuse(runtime: &Runtime, secret: &'static str) -> leasehold::Result<()> {
    let backing = runtime.raw_device().backing(MemoryKind::Device)?;
    let at = secret.as_ptr().addr() as u64;
    backing.fill(at, secret.len() as u64, b'!')?;
    backing.verify(at, 1, 0)?;
    backing.commit(Some(at), 4096)?;
    backing.map(at, 0, 4096)?;
    backing.enable(at, 4096)?;
    backing.destroy(1, 4096)?;
    backing.release(at, 4096);
    let chunk = leasehold::backend::Chunk { addr: at, bytes: 64, native: 0 };
    backing.decommit(chunk)?;
    backing.exact_free(chunk, 8)
}

fn main() {}
