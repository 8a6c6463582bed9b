//! Any function, or any text, would be run by safe code.
#![forbid(unsafe_code)]

use leasehold::kernel::{KernelCheck, KernelDesc, KernelSource, Registry};
use leasehold::{Access, KernelBase};

fn main() {
    let ptx = KernelSource::Ptx("…".into());
    let desc = KernelDesc::new("k", ptx, &[Access::Write], KernelCheck::any());
    KernelBase::new(desc.clone()).unwrap();
    KernelBase::with_sources(vec![desc.clone()]).unwrap();
    Registry::new().register("cuda", desc).unwrap();
}
