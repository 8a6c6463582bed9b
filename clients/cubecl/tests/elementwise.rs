//! Memory and one kernel, end to end.

use cubecl_core as cubecl;
use cubecl_core::prelude::*;
use cubecl_cuda::{CudaDevice, CudaRuntime};
use cubecl_server::runtime::Runtime;

#[cube(launch)]
fn axpy(x: &[f32], y: &mut [f32], a: f32) {
    if ABSOLUTE_POS < y.len() {
        y[ABSOLUTE_POS] += a * x[ABSOLUTE_POS];
    }
}

fn client() -> Client {
    CudaRuntime::client(&CudaDevice::default())
}

fn floats(client: &Client, handle: cubecl_core::server::Handle) -> Vec<f32> {
    f32::from_bytes(&client.read_one(handle).unwrap()).to_vec()
}

#[test]
fn bytes_come_back_as_they_were_written() {
    let client = client();
    for len in [1usize, 3, 4096, 1 << 20] {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let handle = client.create_from_slice(&bytes);
        assert_eq!(&client.read_one(handle).unwrap()[..], &bytes[..]);
    }
}

#[test]
fn a_kernel_computes_from_its_buffers_and_its_scalar() {
    let client = client();
    let n = 1000;
    let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let y = vec![1.0f32; n];
    let (x_at, y_at) =
        (client.create_from_slice(f32::as_bytes(&x)), client.create_from_slice(f32::as_bytes(&y)));
    for _ in 0..3 {
        axpy::launch(
            &client,
            CubeCount::Static(n.div_ceil(64) as u32, 1, 1),
            CubeDim::new_1d(64),
            unsafe { BufferArg::from_raw_parts(x_at.clone(), n) },
            unsafe { BufferArg::from_raw_parts(y_at.clone(), n) },
            0.5,
        );
    }
    let expected: Vec<f32> = x.iter().map(|x| 1.0 + 1.5 * x).collect();
    assert_eq!(floats(&client, y_at), expected);
}

#[test]
fn threads_have_streams_whose_work_is_ordered_by_its_buffers() {
    let client = client();
    let n = 256;
    let y = client.create_from_slice(f32::as_bytes(&vec![0.0f32; n]));
    let x = client.create_from_slice(f32::as_bytes(&vec![1.0f32; n]));
    for _ in 0..4 {
        let (client, x, y) = (client.clone(), x.clone(), y.clone());
        let launch = move || {
            axpy::launch(
                &client,
                CubeCount::Static(4, 1, 1),
                CubeDim::new_1d(64),
                unsafe { BufferArg::from_raw_parts(x, n) },
                unsafe { BufferArg::from_raw_parts(y, n) },
                1.0,
            );
        };
        std::thread::spawn(launch).join().unwrap();
    }
    assert_eq!(floats(&client, y), vec![4.0f32; n]);
    let races = leasehold_capi_sim::take_reports();
    assert!(races.is_empty(), "{races:?}");
}
