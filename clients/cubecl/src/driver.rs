//! What CubeCL's shared commands cannot do themselves: copies and launches.

use crate::compile::{Arguments, Kernels};
use crate::errors;
use crate::lane::Lane;
use crate::storage::DeviceMemory;
use crate::stream::{CubeStream, Streams};
use cubecl_common::bytes::Bytes;
use cubecl_server::allocator::Pitch;
use cubecl_server::command::{CopyLayout, Driver};
use cubecl_server::id::KernelId;
use cubecl_server::memory_management::ManagedMemoryBinding;
use cubecl_server::server::{IoError, LaunchError};
use cubecl_server::storage::{PinnedMemoryAllocController, PinnedMemoryResource};
use leasehold::BufferView;

/// Leasehold, as CubeCL's commands see it.
pub(crate) struct Leasehold;

/// The rows of a copy, each with its bytes on the host.
fn rows(pitch: &Pitch) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let Pitch { width_bytes, height, stride_bytes } = *pitch;
    (0..height)
        .map(move |row| ((row * stride_bytes) as u64, row * width_bytes..(row + 1) * width_bytes))
}

/// The first bytes of a part, which has as many.
fn first(of: &DeviceMemory, bytes: usize) -> leasehold::Result<BufferView<'_>> {
    of.view().part(..bytes)
}

impl Driver for Leasehold {
    type Backend = Streams;
    type Stream = CubeStream;
    type Context = Kernels;
    type LaunchArgs = Arguments;

    unsafe fn pinned_bytes(
        binding: ManagedMemoryBinding,
        resource: PinnedMemoryResource,
        size: usize,
    ) -> Bytes {
        let controller = Box::new(PinnedMemoryAllocController::init(binding, resource));
        // SAFETY: the caller says that the memory is initialised and has as many bytes.
        unsafe { Bytes::from_controller(controller, size) }
    }

    unsafe fn copy_to_host(
        resource: &DeviceMemory,
        layout: &CopyLayout<'_>,
        bytes: &mut Bytes,
        stream: &CubeStream,
    ) -> Result<(), IoError> {
        let count = bytes.len();
        let copy = |stream: &leasehold::Stream| match &layout.pitch {
            None => stream.download(&mut bytes[..], first(resource, count)?),
            Some(pitch) => {
                // Rows without gaps first: the device copies them in one call.
                let packed = stream.runtime().alloc(count as u64)?;
                let shape =
                    leasehold::ops::Rows::new(pitch.width_bytes as u64, pitch.height as u64)
                        .src_pitch(pitch.stride_bytes as u64);
                stream.copy_2d(leasehold::View::view(&packed), resource.view(), shape)?;
                stream.download(&mut bytes[..], leasehold::View::view(&packed))
            }
        };
        stream.lane.run(copy).map_err(|error| errors::io(&error, count as u64))
    }

    unsafe fn copy_to_device(
        resource: &DeviceMemory,
        layout: &CopyLayout<'_>,
        data: &[u8],
        stream: &CubeStream,
    ) -> Result<(), IoError> {
        let copy = |stream: &leasehold::Stream| match &layout.pitch {
            None => stream.upload(first(resource, data.len())?, data),
            Some(pitch) => rows(pitch).try_for_each(|(at, row)| {
                let view = resource.view().narrowed(at, row.len() as u64);
                stream.upload(view, &data[row])
            }),
        };
        stream.lane.run(copy).map_err(|error| errors::io(&error, data.len() as u64))
    }

    unsafe fn copy_on_device(
        source: &DeviceMemory,
        target: &DeviceMemory,
        queue: &'static Lane,
    ) -> Result<(), IoError> {
        let copy = |stream: &leasehold::Stream| stream.copy(target.view(), source.view());
        queue.run(copy).map_err(|error| errors::io(&error, source.view().len()))
    }

    fn launch(
        kernels: &mut Kernels,
        stream: &mut CubeStream,
        kernel: KernelId,
        count: (u32, u32, u32),
        arguments: &mut Arguments,
    ) -> Result<(), LaunchError> {
        let blocks = [count.0, count.1, count.2];
        stream
            .lane
            .run(|stream| kernels.launch(&kernel, stream, blocks, arguments))
            .map_err(|error| errors::launch(&error))
    }
}
