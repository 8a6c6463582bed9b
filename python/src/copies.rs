//! Copies between buffers and arrays of others: what a Python object is as an end of a copy.

use crate::arguments::because;
use crate::buffer::Base;
use crate::dlpack;
use crate::dtype::{self, DType};
use crate::errors::{Class, invalid, is_refusal, raise};
use crate::host::{HostArray, Request};
use crate::layout::Layout;
use crate::memory::Block;
use crate::recorded;
use leasehold_core::sync::Arc;
use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// An end of a copy.
pub(crate) enum End<'py> {
    /// Elements without gaps in a device's memory.
    Block(Arc<Block>, Layout),
    /// Elements in host memory.
    Host(HostArray<'py>),
}

impl<'py> End<'py> {
    /// The elements of a buffer.
    ///
    /// # Errors
    /// `InvalidArgumentError` for elements with gaps in memory that is not the host's.
    pub(crate) fn new(block: Arc<Block>, layout: Layout) -> PyResult<Self> {
        if block.device.host && !layout.is_dense() {
            return Ok(End::Host(HostArray::of_block(block, layout)));
        }
        layout.range()?;
        Ok(End::Block(block, layout))
    }

    /// The elements of a Python object: a buffer, or another library's array.
    pub(crate) fn of(object: &Bound<'py, PyAny>, writable: bool) -> PyResult<Self> {
        if let Ok(buffer) = object.cast::<Base>() {
            let (block, layout) = buffer.get().parts()?;
            return End::new(block, layout);
        }
        let py = object.py();
        let refusal = match Request::of(object, writable) {
            Ok(request) => return HostArray::new(request).map(End::Host),
            Err(error) if is_refusal(py, &error) => error,
            Err(error) => return Err(error),
        };
        if let Some(array) = of_extension(object, writable)? {
            return Ok(End::Host(array));
        }
        if let Some(array) = HostArray::of_interface(object, writable)? {
            return Ok(End::Host(array));
        }
        let refusal = if object.hasattr("__dlpack__")? {
            match dlpack::from_dlpack(object, None, None) {
                Ok(imported) => {
                    let (block, layout) = imported.cast::<Base>()?.get().parts()?;
                    return End::new(block, layout);
                }
                Err(error) if is_refusal(py, &error) => because(py, error, refusal),
                Err(error) => return Err(error),
            }
        } else {
            refusal
        };
        Err(refused(object, refusal))
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            End::Block(_, layout) => layout.dtype,
            End::Host(array) => array.dtype,
        }
    }

    pub(crate) fn shape(&self) -> &[i64] {
        match self {
            End::Block(_, layout) => &layout.shape,
            End::Host(array) => &array.grid.shape,
        }
    }

    /// The block that the elements are in, if it is one.
    fn block(&self) -> Option<&Block> {
        match self {
            End::Block(block, _) => Some(block),
            End::Host(array) => array.block(),
        }
    }

    fn is_swapped(&self) -> bool {
        matches!(self, End::Host(array) if array.swapped)
    }

    /// A layout without gaps for these elements.
    pub(crate) fn dense(&self) -> PyResult<Layout> {
        Layout::dense(self.dtype(), self.shape().to_vec(), 0)
    }
}

/// The error for an object that lends no elements, with what it said itself.
fn refused(object: &Bound<'_, PyAny>, mut refusal: PyErr) -> PyErr {
    let py = object.py();
    let mut said = Vec::new();
    let first = refusal.clone_ref(py);
    loop {
        said.push(refusal.value(py).to_string());
        match refusal.cause(py) {
            Some(cause) => refusal = cause,
            None => break,
        }
    }
    said.reverse();
    let kind = object.get_type().to_string();
    let cure = "pass an array of numbers, as numpy.asarray makes one, or a view as integers";
    let text = format!("{kind} lends no elements: {}; {cure}", said.join("; "));
    because(py, Class::ArgumentType.error(text), first)
}

/// The elements of a NumPy array whose type is another package's, such as `ml_dtypes.bfloat16`.
/// NumPy lends integers in their place.
fn of_extension<'py>(
    object: &Bound<'py, PyAny>,
    writable: bool,
) -> PyResult<Option<HostArray<'py>>> {
    let Ok(named) = object.getattr("dtype") else { return Ok(None) };
    let name = named.getattr("name").and_then(|name| name.extract::<String>());
    let Some(dtype) = name.ok().and_then(|name| dtype::of_extension(&name)) else {
        return Ok(None);
    };
    if !object.hasattr("view")? || !named.hasattr("isnative")? {
        return Ok(None);
    }
    let integers = format!("uint{}", dtype.size * 8);
    let view = object.call_method1("view", (&integers,))?;
    let mut array = match Request::of(&view, writable) {
        Ok(request) => HostArray::new(request)?,
        Err(error) if is_refusal(object.py(), &error) => return Ok(None),
        Err(error) => return Err(error),
    };
    if array.dtype.name != integers || !named.getattr("isnative")?.is_truthy()? {
        return Err(Class::ArgumentType.error(format!("elements of {named} have no type here")));
    }
    array.dtype = dtype;
    Ok(Some(array))
}

/// Checks that elements can be copied as they are.
fn check(to: &End<'_>, from: &End<'_>) -> PyResult<()> {
    let (ours, theirs) = (to.dtype(), from.dtype());
    let shapes = (to.shape(), from.shape());
    let bytes = (to.dense()?.bytes(), from.dense()?.bytes());
    let shown = format!(
        "a copy of {} {} to {} {}",
        Layout::shown(shapes.1),
        theirs.name,
        Layout::shown(shapes.0),
        ours.name
    );
    let byte = dtype::byte();
    if ours != theirs && ours != byte && theirs != byte {
        return Err(invalid(format!(
            "{shown}: the types differ; convert the array, or take views as uint8"
        )));
    }
    if bytes.0 != bytes.1 {
        return Err(invalid(format!(
            "{shown}: {} bytes to {}; both need as many, so copy from or to a part (a slice, or Buffer.view)",
            bytes.1, bytes.0
        )));
    }
    let is_flat = shapes.0.len() == 1 || shapes.1.len() == 1;
    if !is_flat && shapes.0 != shapes.1 {
        return Err(invalid(format!("{shown}: the shapes differ; one of them may be flat")));
    }
    if ours != theirs && (to.is_swapped() || from.is_swapped()) {
        return Err(invalid(format!(
            "{shown}: bytes have no order, and the numbers have not this machine's; convert them \
             with array.astype(array.dtype.newbyteorder(\"=\"))"
        )));
    }
    Ok(())
}

/// Reverses the bytes of each number.
fn swap(bytes: &mut [u8], dtype: DType) {
    bytes.chunks_exact_mut(dtype.part()).for_each(<[u8]>::reverse);
}

/// Writes the elements without gaps, in this machine's order, to memory that has as many bytes.
/// No stream uses them.
fn gather(py: Python<'_>, from: &End<'_>, to: &mut [u8]) -> PyResult<()> {
    assert_eq!(to.len() as u64, from.dense()?.bytes());
    // SAFETY: the target has room for all elements and is nobody else's. Those stay in place as
    // long as the end, and the thread is attached.
    unsafe {
        match from {
            End::Block(block, layout) => {
                let range = (layout.offset, layout.bytes());
                block.read(py, range, to.as_mut_ptr()).map_err(raise)?;
            }
            End::Host(array) => array.grid.gather(to.as_mut_ptr()),
        }
    }
    if from.is_swapped() {
        swap(to, from.dtype());
    }
    Ok(())
}

/// The bytes of a source as those of a target that is not written yet.
pub(crate) fn taken(py: Python<'_>, to: &End<'_>, from: &End<'_>) -> PyResult<Vec<u8>> {
    check(to, from)?;
    recorded::settle(py, from.block().as_slice())?;
    let bytes = from.dense()?.bytes();
    let mut taken = Vec::new();
    taken.try_reserve_exact(bytes as usize).map_err(|_| no_memory(bytes))?;
    taken.resize(bytes as usize, 0);
    gather(py, from, &mut taken)?;
    if to.is_swapped() {
        swap(&mut taken, to.dtype());
    }
    Ok(taken)
}

fn no_memory(bytes: u64) -> PyErr {
    Class::OutOfMemory.error(format!("the host has no memory for a copy of {bytes} bytes"))
}

/// Copies the elements of one end to the other, in the order of their dimensions.
pub(crate) fn copy(py: Python<'_>, to: &End<'_>, from: &End<'_>) -> PyResult<()> {
    check(to, from)?;
    if let End::Host(array) = to {
        array.check_target()?;
    }
    let blocks: Vec<&Block> = [to, from].into_iter().filter_map(End::block).collect();
    recorded::refuse(&blocks)?;
    let bytes = from.dense()?.bytes();
    if let Some(block) = to.block().filter(|block| block.device.host && block.len() == bytes)
        && block.is_broken(py).map_err(raise)?
    {
        // The source may be an array of the memory that is overwritten twice here.
        let staged = taken(py, to, from)?;
        block.settle_to_write(py, bytes).map_err(raise)?;
        return put(py, to, &staged);
    }
    recorded::settle(py, &blocks)?;
    match (to, from) {
        (End::Block(to, at), End::Block(from, from_at)) => {
            to.copy(py, (at.offset, at.bytes()), from, from_at.offset).map_err(raise)
        }
        (End::Block(to, at), End::Host(array)) if array.is_plain() => {
            let range = (at.offset, at.bytes());
            // SAFETY: the array has as many bytes, which stay in place as long as it.
            unsafe { to.write(py, range, array.grid.first) }.map_err(raise)
        }
        (End::Host(array), End::Block(from, at)) if array.is_plain() => {
            let range = (at.offset, at.bytes());
            // SAFETY: the array has room for as many bytes, which stay in place as long as it.
            unsafe { from.read(py, range, array.grid.first) }.map_err(raise)
        }
        _ => {
            // Both ends may have bytes in common, so the elements are taken first.
            put(py, to, &taken(py, to, from)?)
        }
    }
}

/// Writes the bytes of all elements of an end, which nobody uses.
fn put(py: Python<'_>, to: &End<'_>, staged: &[u8]) -> PyResult<()> {
    assert_eq!(staged.len() as u64, to.dense()?.bytes());
    // SAFETY: the end has room for as many bytes, which stay in place as long as it.
    unsafe {
        match to {
            End::Block(block, at) => {
                block.write(py, (at.offset, at.bytes()), staged.as_ptr()).map_err(raise)?;
            }
            End::Host(array) => array.grid.scatter(staged.as_ptr()),
        }
    }
    Ok(())
}

/// The bytes of the elements without gaps, in the order of their dimensions.
pub(crate) fn bytes<'py>(py: Python<'py>, from: &End<'_>) -> PyResult<Bound<'py, PyBytes>> {
    let bytes = from.dense()?.bytes();
    recorded::settle(py, from.block().as_slice())?;
    PyBytes::new_with(py, bytes as usize, |to| gather(py, from, to)).map_err(|error| {
        let kind = error.get_type(py);
        let is_pythons = kind.is(py.get_type::<PyMemoryError>());
        // The number of bytes may be beyond an object's largest.
        if is_pythons || kind.is(py.get_type::<PyOverflowError>()) {
            because(py, no_memory(bytes), error)
        } else {
            error
        }
    })
}
