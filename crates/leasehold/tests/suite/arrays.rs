//! Typed memory.

use crate::common::*;
use bytemuck::{NoUninit, Zeroable};
use leasehold::{Array, ArrayView, Buffer, Lease, View};
use std::fmt::Debug;
use std::sync::Arc;

/// Twelve bytes: no pattern of a fill's.
#[derive(
    Debug, Clone, Copy, PartialEq, leasehold::bytemuck::Pod, leasehold::bytemuck::Zeroable,
)]
#[repr(C)]
struct Triple {
    a: u32,
    b: f32,
    c: u32,
}

#[test]
fn values_go_in_and_come_out() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let values: Vec<u64> = (0..1000).map(|i| i << 33).collect();
    let x = runtime.upload(&values).unwrap();
    assert_eq!((x.len(), x.buffer().len(), x.is_empty()), (1000, 8000, false));
    assert_eq!(runtime.to_vec(&x).unwrap(), values);
    assert_eq!(stream.runtime().to_vec(x.slice(10..=12)).unwrap(), values[10..=12]);
    let mut into = vec![1u64; 3];
    stream.download_into(&mut into, x.slice(999..).view()).unwrap();
    assert_eq!(into, [999 << 33]);
    // Owned: nothing is staged, and the host's values go when the copy has taken them.
    let shared: Arc<[u64]> = values.clone().into();
    let owned = [(); 3].map(|()| runtime.alloc_array::<u64>(values.len()).unwrap());
    stream.upload_owned(owned[0].view(), values.clone()).unwrap();
    stream.upload_owned(owned[1].view(), values.clone().into_boxed_slice()).unwrap();
    stream.upload_owned(owned[2].view(), shared.clone()).unwrap();
    for y in owned {
        assert_eq!(runtime.to_vec(&y).unwrap(), values);
    }
    stream.upload_owned(x.slice(..2).view(), Arc::new(vec![7u64, 8])).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(runtime.to_vec(x.slice(..3)).unwrap(), [7, 8, 2 << 33]);
    assert_eq!(Arc::strong_count(&shared), 1, "a copy that is over keeps nothing");
}

#[track_caller]
fn filled<T: NoUninit + leasehold::bytemuck::AnyBitPattern + PartialEq + Debug>(value: T) {
    let runtime = runtime();
    for len in [0, 1, 2, 3, 1000, 5000] {
        let x = runtime.alloc_array(len).unwrap();
        runtime.stream().fill_with(&x, value).unwrap();
        assert_eq!(runtime.to_vec(&x).unwrap(), vec![value; len]);
        let zeros: Array<T> = runtime.zeros(len).unwrap();
        if len > 2 {
            runtime.stream().fill_with(zeros.slice(1..len - 1), value).unwrap();
            let mut expect = vec![value; len];
            (expect[0], expect[len - 1]) = (T::zeroed(), T::zeroed());
            assert_eq!(runtime.to_vec(&zeros).unwrap(), expect, "beside the part");
        }
    }
}

#[test]
fn any_plain_value_fills_an_array() {
    filled(0xabu8);
    filled(-2i16);
    filled(1.5f32);
    filled(0x0102_0304_0506_0708u64);
    filled(0x0707_0707_0707_0707u64);
    filled(1.25f64);
    filled([1u8, 2, 3]);
    filled(Triple { a: 1, b: 2.0, c: 3 });
}

#[test]
#[cfg(feature = "half")]
fn numbers_of_sixteen_bits_are_plain_data() {
    use leasehold::{bf16, f16};
    filled(f16::from_f32(1.5));
    filled(bf16::from_f32(-2.25));
    let runtime = runtime();
    let x = runtime.zeros::<f16>(3).unwrap();
    runtime.stream().fill(x.slice(1..).view(), f16::ONE).unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [f16::ZERO, f16::ONE, f16::ONE]);
}

#[test]
fn a_recorded_fill_of_odd_values_is_replayed() {
    let runtime = runtime();
    let x = runtime.zeros::<Triple>(1000).unwrap();
    let value = Triple { a: 5, b: 6.0, c: 7 };
    let graph = runtime.record_graph(|r| r.stream().fill_with(&x, value)).unwrap();
    assert_eq!(runtime.to_vec(x.slice(..1)).unwrap(), [Triple::zeroed()]);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [value; 1000]);
}

#[test]
fn parts_lie_in_their_array() {
    let runtime = runtime();
    let x = runtime.upload(&[0u16, 1, 2, 3, 4, 5, 6, 7]).unwrap();
    let part = x.slice(2..7).slice(1..);
    assert_eq!((part.len(), part.view().offset(), part.view().len()), (4, 6, 8));
    assert_eq!(runtime.to_vec(part).unwrap(), [3, 4, 5, 6]);
    assert!(x.slice(8..).is_empty());
    for refused in [
        x.as_view().try_slice(3..9),
        x.as_view().try_slice(9..),
        x.as_view().try_slice(..=8),
        x.as_view().try_slice(..=usize::MAX),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("do not lie in 8 values"), "{error}");
    }
    let backwards = std::ops::Range { start: 5, end: 4 };
    assert_eq!(kind(x.as_view().try_slice(backwards)), "InvalidArgument");
    let panicked = std::panic::catch_unwind(|| x.slice(3..9).len()).unwrap_err();
    assert!(panicked.downcast_ref::<String>().unwrap().contains("3..9"));
}

#[test]
fn an_array_is_a_lease_of_its_buffer() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32, 2, 3]).unwrap();
    let clone = x.clone();
    let buffer: Lease<Buffer> = x.clone().into();
    assert!(buffer.same(x.buffer()) && clone.same(&buffer));
    runtime.stream().fill(buffer.view(), 9u32).unwrap();
    assert_eq!(runtime.to_vec(&clone).unwrap(), [9; 3]);
    let bytes = Array::<u8>::from_buffer(clone.into_buffer()).unwrap();
    assert_eq!(bytes.len(), 12);
    assert_eq!(kind(Array::<u64>::from_buffer(buffer.clone())), "InvalidArgument");
    let words: ArrayView<'_, u16> = buffer.view().values().unwrap();
    assert_eq!(words.len(), 6);
    assert_eq!(kind(buffer.part(..3).unwrap().values::<u16>()), "InvalidArgument");
}

#[test]
fn no_size_is_too_large_to_be_refused() {
    let runtime = runtime();
    assert_eq!(kind(runtime.alloc_array::<u64>(usize::MAX)), "InvalidArgument");
    assert_eq!(kind(runtime.alloc_array::<u64>(usize::MAX / 8)), "OutOfMemory");
    // Values without a size: no memory, and none of them.
    let nothing = runtime.alloc_array::<()>(5).unwrap();
    assert_eq!((nothing.len(), nothing.buffer().len()), (0, 0));
    assert!(runtime.to_vec(&nothing).unwrap().is_empty());
    runtime.stream().fill_with(&nothing, ()).unwrap();
}
