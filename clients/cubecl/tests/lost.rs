//! A kernel that leaves its buffer: the simulated device refuses the access, and is lost as a real
//! one is.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use cubecl_cuda::{CudaDevice, CudaRuntime};
use cubecl_server::runtime::Runtime;

#[cube(launch_unchecked)]
fn beyond(out: &mut [u32]) {
    out[ABSOLUTE_POS + 1024] = 1u32;
}

#[test]
fn an_access_beyond_a_buffer_is_named_and_loses_the_device() {
    let client = CudaRuntime::client(&CudaDevice::default());
    let out = client.empty(4);
    unsafe {
        beyond::launch_unchecked(
            &client,
            CubeCount::new_single(),
            CubeDim::new_1d(1),
            BufferArg::from_raw_parts(out.clone(), 1),
        );
    }
    let error = client.read_one(out).expect_err("nothing wrote the buffer");
    assert!(error.is_device_poisoned(), "{error}");
    let text = error.to_string();
    assert!(text.contains("4 bytes outside of its bindings"), "{text}");
    let later = client.read_one(client.create_from_slice(&[7u8; 4]));
    assert!(later.is_err_and(|error| error.is_device_poisoned()));
}
