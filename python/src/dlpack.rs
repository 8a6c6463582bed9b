//! DLPack, both ways: capsules with and without a version, after the array API standard.
//!
//! A tensor that is exported keeps its block. The consumer calls its deleter, on any thread.

use crate::arguments;
use crate::buffer::{self, Base};
use crate::device::{DL_CPU, State, state};
use crate::dtype;
use crate::errors::{Class, invalid, raise};
use crate::layout::{Layout, MOST_DIMENSIONS, dense, elements};
use crate::memory::Block;
use crate::recorded;
use leasehold::cuda::{self, ExternalStream};
use leasehold_core::sync::Arc;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

/// The version whose structs are here.
const VERSION: (u32, u32) = (1, 0);
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;

/// The names of capsules, before and after a consumer took the tensor.
const PLAIN: (&CStr, &CStr) = (c"dltensor", c"used_dltensor");
const VERSIONED: (&CStr, &CStr) = (c"dltensor_versioned", c"used_dltensor_versioned");

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// The end of both forms: the owner's value, and the function that a consumer calls at the end.
#[repr(C)]
struct Owner<M> {
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut M)>,
}

impl<M> Owner<M> {
    const NONE: Self = Self { context: std::ptr::null_mut(), deleter: None };
}

/// `DLManagedTensor`.
#[repr(C)]
struct Plain {
    tensor: Tensor,
    owner: Owner<Plain>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    owner: Owner<Versioned>,
    flags: u64,
    tensor: Tensor,
}

/// The two forms of a tensor with its owner.
trait Managed: Sized {
    const NAMES: (&'static CStr, &'static CStr);
    fn new(tensor: Tensor, flags: u64) -> Self;
    fn owner(&mut self) -> &mut Owner<Self>;
    fn tensor(&self) -> &Tensor;
    fn read_only(&self) -> bool;
}

impl Managed for Plain {
    const NAMES: (&'static CStr, &'static CStr) = PLAIN;

    fn new(tensor: Tensor, _: u64) -> Self {
        Self { tensor, owner: Owner::NONE }
    }

    fn owner(&mut self) -> &mut Owner<Self> {
        &mut self.owner
    }

    fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn read_only(&self) -> bool {
        false
    }
}

impl Managed for Versioned {
    const NAMES: (&'static CStr, &'static CStr) = VERSIONED;

    fn new(tensor: Tensor, flags: u64) -> Self {
        let (major, minor) = VERSION;
        Self { major, minor, owner: Owner::NONE, flags, tensor }
    }

    fn owner(&mut self) -> &mut Owner<Self> {
        &mut self.owner
    }

    fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }
}

// ---- export

/// The wishes of a consumer.
pub(crate) struct Request {
    pub(crate) stream: Option<i128>,
    pub(crate) max_version: Option<(u32, u32)>,
    pub(crate) device: Option<(i32, i32)>,
    pub(crate) copy: Option<bool>,
}

/// A tensor for a consumer, and what it needs.
struct Exported<M> {
    managed: M,
    _shape: Vec<i64>,
    _strides: Vec<i64>,
    _keeper: Keeper,
}

/// Keeps the memory for a consumer, and tells the block of the consumer's end.
struct Keeper {
    block: Arc<Block>,
    /// The consumer's stream. A handle would not do: another thread may drop the tensor.
    stream: Option<Arc<ExternalStream>>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some(stream) = &self.stream {
            self.block.end_consumer(stream);
        }
        self.block.end_export();
    }
}

/// The deleter of an exported tensor.
///
/// # Safety
/// - `managed` is the tensor of an [`Exported`], and is deleted once.
unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    // SAFETY: the context of an exported tensor is its box, which goes now.
    let exported = unsafe { Box::from_raw((*managed).owner().context.cast::<Exported<M>>()) };
    // A panic must not pass into the consumer.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(exported)));
}

/// The destructor of a capsule: deletes a tensor that nobody took.
///
/// # Safety
/// - `capsule` is a capsule with a tensor of this form.
unsafe extern "C" fn end<M: Managed>(capsule: *mut ffi::PyObject) {
    let name = M::NAMES.0.as_ptr();
    // SAFETY: the interpreter passes the capsule. Under this name it has a tensor, which nobody
    // took, so its deleter is called once.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, name).cast::<M>();
            if let Some(deleter) = (*managed).owner().deleter {
                deleter(managed);
            }
        }
    }
}

fn wrap<'py, M: Managed>(
    py: Python<'py>,
    keeper: Keeper,
    layout: &Layout,
    flags: u64,
) -> PyResult<Bound<'py, PyAny>> {
    let (device_type, device_id) = keeper.block.device.dlpack();
    let address = keeper.block.address(layout.offset);
    let mut shape = layout.shape.clone();
    let mut strides = layout.strides.clone();
    let tensor = Tensor {
        data: if layout.count() == 0 { std::ptr::null_mut() } else { address as *mut c_void },
        device_type,
        device_id,
        ndim: shape.len() as i32,
        code: layout.dtype.code,
        bits: (layout.dtype.size * 8) as u8,
        lanes: 1,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    // The numbers lie on the heap and stay where they are as the vectors move.
    let managed = M::new(tensor, flags);
    let made = Box::new(Exported { managed, _shape: shape, _strides: strides, _keeper: keeper });
    let made = Box::into_raw(made);
    // SAFETY: the box was just given up, and is whole until its deleter takes it back.
    let managed = unsafe {
        let managed = &raw mut (*made).managed;
        *(*managed).owner() = Owner { context: made.cast(), deleter: Some(delete::<M>) };
        managed
    };
    // SAFETY: the name lives forever, and the capsule's end deletes the tensor unless a consumer
    // does.
    unsafe {
        let capsule = ffi::PyCapsule_New(managed.cast(), M::NAMES.0.as_ptr(), Some(end::<M>));
        if capsule.is_null() {
            delete::<M>(managed);
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// The handle of the consumer's stream; `None` where nothing is to be ordered.
fn consumer(device: &State, stream: Option<i128>) -> PyResult<Option<u64>> {
    match (device.host, stream) {
        (true, None) => Ok(None),
        (true, Some(_)) => Err(invalid("a stream was given for memory of the host")),
        // The legacy default stream.
        (false, None) => Ok(Some(1)),
        (false, Some(-1)) => Ok(None),
        (false, Some(0)) => {
            Err(invalid("stream 0 may mean two default streams; use 1 (legacy) or 2 (per thread)"))
        }
        (false, Some(stream)) => {
            u64::try_from(stream).map(Some).map_err(|_| invalid(format!("{stream} is no stream")))
        }
    }
}

/// A capsule with the memory of a buffer.
pub(crate) fn export<'py>(
    py: Python<'py>,
    of: &Base,
    request: &Request,
) -> PyResult<Bound<'py, PyAny>> {
    let (mut block, mut layout) = of.parts()?;
    let mut stream = consumer(&block.device, request.stream)?;
    let own = block.device.dlpack();
    let target = request.device.unwrap_or(own);
    let mut flags = 0;
    if target != own || request.copy == Some(true) {
        if target != own && target.0 != DL_CPU {
            return Err(Class::Export.error(format!(
                "{} exports its memory as DLPack's device {own:?} or copies it to the host, not to \
                 {target:?}",
                block.device.name
            )));
        }
        if request.copy == Some(false) {
            return Err(Class::Export.error(format!(
                "{} cannot show its memory to DLPack's device {target:?} without a copy",
                block.device.name
            )));
        }
        let device = if target == own { block.device.clone() } else { host(py)? };
        let pool = device.outside(py, || device.main()).map_err(raise)?;
        (block, layout) = of.dense_copy(py, &pool)?;
        flags |= IS_COPIED;
        if block.device.host {
            stream = None;
        }
    }
    if block.read_only {
        flags |= READ_ONLY;
    }
    let versioned = request.max_version.is_some_and(|(major, _)| major >= VERSION.0);
    if block.read_only && !versioned {
        return Err(Class::Export.error(
            "the memory is read-only, which a consumer learns with DLPack 1.0 (max_version) alone",
        ));
    }
    let orders = !block.device.host;
    recorded::settle(py, &[&*block])?;
    block.begin_export();
    // From here on the keeper takes the export back.
    let mut keeper = Keeper { block, stream: None };
    match stream {
        Some(handle) => {
            let begun = py.detach(|| keeper.block.begin_consumer(handle));
            keeper.stream = begun.map_err(raise)?;
        }
        // The consumer's streams stay unknown, so the memory's end waits for all of them.
        None if orders => keeper.block.lend(),
        None => {}
    }
    if versioned {
        wrap::<Versioned>(py, keeper, &layout, flags)
    } else {
        wrap::<Plain>(py, keeper, &layout, flags)
    }
}

fn host(py: Python<'_>) -> PyResult<Arc<State>> {
    State::host(py).map_err(raise)
}

// ---- import

/// A tensor that was taken from its capsule: dropped by its deleter.
struct Taken<M: Managed>(NonNull<M>);

// SAFETY: DLPack lets a consumer call the deleter on any thread, and nothing else is done with it.
unsafe impl<M: Managed> Send for Taken<M> {}
// SAFETY: nothing is done by reference.
unsafe impl<M: Managed> Sync for Taken<M> {}

impl<M: Managed> Drop for Taken<M> {
    fn drop(&mut self) {
        // SAFETY: the tensor was taken once and is deleted once.
        unsafe {
            if let Some(deleter) = self.0.as_mut().owner().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Takes a capsule's tensor, if it has this form.
fn take<M: Managed>(capsule: &Bound<'_, PyCapsule>) -> PyResult<Option<Taken<M>>> {
    let (fresh, used) = M::NAMES;
    // SAFETY: a capsule that is alive; under its name it has a tensor of this form. After the new
    // name nobody else takes or deletes it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), fresh.as_ptr()) != 1 {
            return Ok(None);
        }
        let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), fresh.as_ptr()).cast::<M>();
        let pointer = NonNull::new(pointer).ok_or_else(|| PyErr::fetch(capsule.py()))?;
        if ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Some(Taken(pointer)))
    }
}

/// The bytes that strided elements span: those before the first one, and all.
fn span(shape: &[i64], strides: &[i64], size: i64) -> Option<(u64, u64)> {
    let (mut below, mut above) = (0i64, 0i64);
    for (&n, &stride) in shape.iter().zip(strides) {
        let reach = (n - 1).checked_mul(stride)?;
        let side = if reach < 0 { &mut below } else { &mut above };
        *side = side.checked_add(reach)?;
    }
    let bytes = above.checked_sub(below)?.checked_add(1)?.checked_mul(size)?;
    Some((below.checked_neg()?.checked_mul(size)? as u64, bytes as u64))
}

/// The layout of a tensor in the memory around its elements, the memory's address and its bytes.
fn describe(tensor: &Tensor) -> PyResult<(Layout, u64, u64)> {
    let refuse = |text: String| Class::Export.error(text);
    let Tensor { code, bits, lanes, .. } = *tensor;
    let found = if lanes == 1 { dtype::of_dlpack(code, bits) } else { None };
    let dtype = found.ok_or_else(|| {
        refuse(format!("elements of kind {code}, {bits} bits and {lanes} lanes have no name here"))
    })?;
    let ndim = usize::try_from(tensor.ndim).ok().filter(|&n| n <= MOST_DIMENSIONS);
    let ndim = ndim.ok_or_else(|| refuse(format!("{} dimensions", tensor.ndim)))?;
    let list = |at: *const i64| {
        // SAFETY: the producer says that so many numbers lie there.
        let list = unsafe { std::slice::from_raw_parts(at, ndim) };
        list.to_vec()
    };
    let shape = match ndim {
        0 => Vec::new(),
        _ if tensor.shape.is_null() => return Err(refuse("a tensor without a shape".to_owned())),
        _ => list(tensor.shape),
    };
    if shape.iter().any(|&n| n < 0) {
        return Err(refuse(format!("a shape of {shape:?}")));
    }
    let count = elements(&shape, dtype)?;
    if count == 0 {
        let layout = Layout::dense(dtype, shape, 0)?;
        return Ok((layout, 0, 0));
    }
    let mut strides = dense(&shape);
    if ndim > 0 && !tensor.strides.is_null() {
        // The stride of a single element means nothing, and may be any number.
        let given = list(tensor.strides).into_iter().zip(&shape).zip(&mut strides);
        given.filter(|((_, n), _)| **n != 1).for_each(|((given, _), stride)| *stride = given);
    }
    let too_far = || refuse(format!("strides of {strides:?} elements in a shape of {shape:?}"));
    let (before, bytes) = span(&shape, &strides, dtype.size).ok_or_else(too_far)?;
    let first = (tensor.data as u64).checked_add(tensor.byte_offset).ok_or_else(too_far)?;
    let address = first.checked_sub(before).filter(|&at| at != 0 && !tensor.data.is_null());
    let address = address.ok_or_else(|| refuse("a tensor without memory".to_owned()))?;
    if !first.is_multiple_of(dtype.size.min(8) as u64) {
        return Err(refuse(format!("elements of {} bytes at {first:#x}", dtype.size)));
    }
    Ok((Layout { dtype, shape, strides, offset: before }, address, bytes))
}

fn import<M: Managed + 'static>(py: Python<'_>, taken: Taken<M>) -> PyResult<Bound<'_, PyAny>> {
    // SAFETY: the tensor lives until its deleter is called.
    let managed = unsafe { taken.0.as_ref() };
    let tensor = managed.tensor();
    let (layout, address, bytes) = describe(tensor)?;
    let device = (tensor.device_type, tensor.device_id);
    let device = State::of_dlpack(py, device.0, device.1).map_err(raise)?;
    let read_only = managed.read_only();
    // SAFETY: the producer says where the elements lie, on which device, and that they stay until
    // the deleter is called. Its own use of the memory is ordered by the interpreter's lock on the
    // host, and by the stream that it was given on a device.
    let block = unsafe { Block::import(device, (address, bytes), read_only, Arc::new(taken)) };
    buffer::of_block(py, block.map_err(raise)?, layout)
}

fn of_capsule<'py>(capsule: &Bound<'py, PyCapsule>) -> PyResult<Bound<'py, PyAny>> {
    let py = capsule.py();
    let name = VERSIONED.0.as_ptr();
    // SAFETY: a capsule that is alive; the versions come first in the struct, whatever the version.
    let version = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), name) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name).cast::<[u32; 2]>();
            Some(managed.read())
        } else {
            None
        }
    };
    match version {
        Some([major, minor]) if major != VERSION.0 => {
            return Err(Class::Export.error(format!(
                "a tensor of DLPack {major}.{minor}; {}.x is known here",
                VERSION.0
            )));
        }
        Some(_) => {
            if let Some(taken) = take::<Versioned>(capsule)? {
                return import(py, taken);
            }
        }
        None => {
            if let Some(taken) = take::<Plain>(capsule)? {
                return import(py, taken);
            }
        }
    }
    Err(invalid("the capsule has no tensor, or another consumer took it"))
}

/// The stream that a producer orders its work before: this device's own.
fn own_stream(device: &State) -> leasehold::Result<Option<u64>> {
    device.check_process()?;
    if device.host {
        return Ok(None);
    }
    cuda::raw_stream(device.runtime.stream()).map(Some)
}

/// The memory of another library's array as a buffer, or a copy of it on another device.
#[pyfunction]
#[pyo3(signature = (x, /, *, device=None, copy=None))]
pub(crate) fn from_dlpack<'py>(
    x: &Bound<'py, PyAny>,
    device: Option<&Bound<'py, PyAny>>,
    copy: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let copy = arguments::optional(copy, "copy is True, False or None")?;
    let target = device.map(state).transpose()?;
    let found = if let Ok(capsule) = x.cast::<PyCapsule>() {
        of_capsule(capsule)?
    } else {
        if !x.hasattr("__dlpack_device__")? {
            let kind = x.get_type();
            return Err(Class::ArgumentType.error(format!("{kind} has no __dlpack_device__")));
        }
        let numbers = x.call_method0("__dlpack_device__")?;
        let (kind, ordinal) = arguments::value(&numbers, "a device of DLPack is two numbers")?;
        let source = State::of_dlpack(py, kind, ordinal).map_err(raise)?;
        let stream = py.detach(|| own_stream(&source)).map_err(raise)?;
        let arguments = PyDict::new(py);
        // A producer without streams of its own takes none.
        if stream.is_some() {
            arguments.set_item("stream", stream)?;
        }
        let plain = arguments.copy()?;
        arguments.set_item("max_version", VERSION)?;
        let capsule = match x.call_method("__dlpack__", (), Some(&arguments)) {
            // A producer from before DLPack 1.0.
            Err(e) if e.is_instance_of::<PyTypeError>(py) => {
                x.call_method("__dlpack__", (), Some(&plain))?
            }
            other => other?,
        };
        let Ok(capsule) = capsule.cast::<PyCapsule>() else {
            return Err(Class::ArgumentType.error("__dlpack__ returned no capsule"));
        };
        of_capsule(capsule)?
    };
    let base = found.cast::<Base>()?;
    let moves = target.as_ref().is_some_and(|to| !Arc::ptr_eq(to, base.get().state()));
    if !moves && copy != Some(true) {
        return Ok(found);
    }
    if copy == Some(false) {
        return Err(invalid("the array lies on another device, and no copy is allowed"));
    }
    let to = target.unwrap_or_else(|| base.get().state().clone());
    let pool = to.outside(py, || to.main()).map_err(raise)?;
    let (block, layout) = base.get().dense_copy(py, &pool)?;
    buffer::of_block(py, block, layout)
}
