//! Buffers: the elements of an array in a device's memory.

use crate::allocator::Pool;
use crate::arguments;
use crate::copies::{self, End};
use crate::device::{Device, State, state};
use crate::dlpack;
use crate::download::Download;
use crate::dtype;
use crate::errors::{Class, invalid, raise};
use crate::layout::Layout;
use crate::memory::Block;
use crate::recorded;
use leasehold_core::sync::{Arc, Mutex};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyTuple, PyType};

/// The memory of a buffer and its views, until it is freed.
struct Memory {
    device: Arc<State>,
    block: Mutex<Option<Arc<Block>>>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut block = self.block.get_mut().take();
        if block.is_none() {
            return;
        }
        Python::try_attach(|py| {
            // The end of the memory may run code of its owner, which must not meet the exception
            // that ends this object.
            let mut pending = [std::ptr::null_mut(); 3];
            let [class, value, traceback] = &mut pending;
            // SAFETY: the thread is attached. The exception is given back once.
            unsafe { ffi::PyErr_Fetch(class, value, traceback) };
            if block.as_ref().is_some_and(|block| !block.is_on_streams()) {
                block = None;
            } else {
                // The memory may have to wait for its uses.
                py.detach(|| drop(block.take()));
            }
            // SAFETY: as above.
            unsafe { ffi::PyErr_Restore(pending[0], pending[1], pending[2]) };
        });
    }
}

/// The parts of a new buffer, for its constructor: Python code cannot make one.
#[pyclass(frozen, name = "_Parts", module = "leasehold")]
pub(crate) struct Parts(Mutex<Option<(Arc<Memory>, Layout)>>);

/// All of `Buffer` but the buffer protocol.
#[pyclass(frozen, subclass, weakref, name = "_Buffer", module = "leasehold")]
pub(crate) struct Base {
    memory: Arc<Memory>,
    layout: Layout,
}

static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Keeps the type `Buffer`, which `host` makes.
pub(crate) fn set_type(buffer: &Bound<'_, PyType>) {
    // A module that is loaded twice has the same type.
    let _ = TYPE.set(buffer.py(), buffer.clone().unbind());
}

fn make(py: Python<'_>, memory: Arc<Memory>, layout: Layout) -> PyResult<Bound<'_, PyAny>> {
    let class = TYPE.get(py).ok_or_else(|| Class::Other.error("the module was not loaded"))?;
    class.bind(py).call1((Parts(Mutex::new(Some((memory, layout)))),))
}

/// A buffer with all elements of a block.
pub(crate) fn of_block(
    py: Python<'_>,
    block: Arc<Block>,
    layout: Layout,
) -> PyResult<Bound<'_, PyAny>> {
    let device = block.device.clone();
    make(py, Arc::new(Memory { device, block: Mutex::new(Some(block)) }), layout)
}

pub(crate) fn allocate(py: Python<'_>, pool: &Arc<Pool>, bytes: u64) -> PyResult<Arc<Block>> {
    pool.device.outside(py, || Block::allocate(pool, bytes)).map_err(raise)
}

/// A new block for a dense array.
fn block_for<'py>(
    pool: &Arc<Pool>,
    shape: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Arc<Block>, Layout)> {
    let sizes = arguments::shape(shape)?;
    let dtype = match dtype {
        Some(dtype) => dtype::parse(dtype)?,
        // A size in bytes.
        None if shape.extract::<i64>().is_ok() => dtype::byte(),
        None => {
            return Err(Class::ArgumentType.error(format!(
                "the shape {} without a type; name one, such as \"float32\"",
                Layout::shown(&sizes)
            )));
        }
    };
    let layout = Layout::dense(dtype, sizes, 0)?;
    Ok((allocate(shape.py(), pool, layout.bytes())?, layout))
}

pub(crate) fn empty<'py>(
    pool: &Arc<Pool>,
    shape: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (block, layout) = block_for(pool, shape, dtype)?;
    of_block(shape.py(), block, layout)
}

pub(crate) fn zeros<'py>(
    pool: &Arc<Pool>,
    shape: &Bound<'py, PyAny>,
    dtype: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (block, layout) = block_for(pool, shape, dtype)?;
    block.fill(shape.py(), (0, layout.bytes()), &[0]).map_err(raise)?;
    of_block(shape.py(), block, layout)
}

/// A buffer with the contents of another array, in the order of its rows.
pub(crate) fn upload<'py>(
    pool: &Arc<Pool>,
    array: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    copied(array.py(), pool, &End::of(array, false)?)
}

/// A new buffer with the elements of an end.
fn copied<'py>(py: Python<'py>, pool: &Arc<Pool>, from: &End<'py>) -> PyResult<Bound<'py, PyAny>> {
    let (block, layout) = dense_copy(py, pool, from)?;
    of_block(py, block, layout)
}

/// New memory with the elements of an end.
fn dense_copy(py: Python<'_>, pool: &Arc<Pool>, from: &End<'_>) -> PyResult<(Arc<Block>, Layout)> {
    let layout = from.dense()?;
    let block = allocate(py, pool, layout.bytes())?;
    copies::copy(py, &End::Block(block.clone(), layout.clone()), from)?;
    Ok((block, layout))
}

impl Base {
    /// The memory and where the elements lie in it.
    pub(crate) fn parts(&self) -> PyResult<(Arc<Block>, Layout)> {
        let block = self.memory.block.lock().clone();
        let block = block.ok_or_else(|| Class::Freed.error("the buffer was freed"))?;
        Ok((block, self.layout.clone()))
    }

    /// The memory, and the range of its bytes that the elements are.
    ///
    /// # Errors
    /// `InvalidArgumentError` for elements with gaps.
    pub(crate) fn range(&self) -> PyResult<(Arc<Block>, (u64, u64))> {
        let block = self.memory.block.lock().clone();
        let block = block.ok_or_else(|| Class::Freed.error("the buffer was freed"))?;
        Ok((block, self.layout.range()?))
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn state(&self) -> &Arc<State> {
        &self.memory.device
    }

    /// A copy in new memory of an allocator.
    pub(crate) fn dense_copy(
        &self,
        py: Python<'_>,
        pool: &Arc<Pool>,
    ) -> PyResult<(Arc<Block>, Layout)> {
        dense_copy(py, pool, &self.end()?)
    }

    /// The elements as an end of a copy.
    fn end<'py>(&self) -> PyResult<End<'py>> {
        let (block, layout) = self.parts()?;
        End::new(block, layout)
    }
}

#[pymethods]
impl Base {
    #[new]
    fn new(parts: &Bound<'_, Parts>) -> PyResult<Self> {
        let parts = parts.get().0.lock().take();
        let (memory, layout) = parts.ok_or_else(|| invalid("the parts were used"))?;
        Ok(Self { memory, layout })
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.memory.device.clone())
    }

    /// The type of the elements, by NumPy's name.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.layout.dtype.name
    }

    /// Elements in each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.layout.shape)
    }

    /// Bytes from one element to the next, by dimension.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.byte_strides())
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.layout.shape.len()
    }

    /// The number of elements.
    #[getter]
    fn size(&self) -> i64 {
        self.layout.count()
    }

    /// Bytes of an element.
    #[getter]
    fn itemsize(&self) -> i64 {
        self.layout.dtype.size
    }

    /// Bytes of all elements.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.layout.bytes()
    }

    /// Whether the elements follow one another without gaps, the last dimension fastest.
    #[getter]
    fn is_contiguous(&self) -> bool {
        self.layout.is_dense()
    }

    /// Whether the memory cannot be written.
    #[getter]
    fn readonly(&self) -> PyResult<bool> {
        Ok(self.parts()?.0.read_only)
    }

    /// The address of the first element, in the device's memory.
    #[getter]
    fn address(&self) -> PyResult<u64> {
        Ok(self.parts()?.0.address(self.layout.offset))
    }

    /// Whether the memory was freed.
    #[getter]
    fn freed(&self) -> bool {
        self.memory.block.lock().is_none()
    }

    /// The name of the memory in reports and snapshots.
    #[getter]
    fn name(&self) -> PyResult<Option<String>> {
        Ok(self.parts()?.0.name())
    }

    #[setter]
    fn set_name(&self, name: &Bound<'_, PyAny>) -> PyResult<()> {
        let name: String = arguments::value(name, "a name is a text")?;
        self.parts()?.0.set_name(&name);
        Ok(())
    }

    /// The same memory, or a part of it from `offset` bytes on, as another type or shape.
    #[pyo3(
        signature = (dtype=None, shape=None, *, offset=None),
        text_signature = "($self, dtype=None, shape=None, *, offset=0)"
    )]
    fn view<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        shape: Option<&Bound<'py, PyAny>>,
        offset: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let offset = arguments::optional(offset, "an offset is a number of bytes")?.unwrap_or(0);
        let (_, layout) = self.parts()?;
        let (at, bytes) = layout.range()?;
        let dtype = dtype.map_or(Ok(self.layout.dtype), dtype::parse)?;
        let left = bytes.checked_sub(offset);
        let left =
            left.ok_or_else(|| invalid(format!("an offset of {offset} in {bytes} bytes")))?;
        let shape = match shape {
            Some(shape) => arguments::shape(shape)?,
            None if left.is_multiple_of(dtype.size as u64) => vec![left as i64 / dtype.size],
            None => {
                return Err(invalid(format!(
                    "{left} bytes are no whole number of elements of {} bytes",
                    dtype.size
                )));
            }
        };
        let layout = Layout::dense(dtype, shape, at + offset)?;
        if layout.bytes() > left {
            return Err(invalid(format!("a view of {} bytes in {left}", layout.bytes())));
        }
        if !layout.offset.is_multiple_of(dtype.size as u64) {
            return Err(invalid(format!(
                "elements of {} bytes do not begin at byte {}",
                dtype.size, layout.offset
            )));
        }
        make(py, self.memory.clone(), layout)
    }

    /// Sets every element to a number.
    fn fill(&self, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = value.py();
        let element = self.layout.dtype.pack(value)?;
        match self.end()? {
            End::Block(block, layout) => {
                recorded::refuse(&[&*block])?;
                block.fill(py, layout.range()?, &element).map_err(raise)
            }
            End::Host(array) => array.fill(py, &element),
        }
    }

    /// Copies from another buffer, or another library's array.
    fn copy_from(&self, source: &Bound<'_, PyAny>) -> PyResult<()> {
        copies::copy(source.py(), &self.end()?, &End::of(source, false)?)
    }

    /// Copies to another buffer, or another library's array.
    fn copy_to(&self, target: &Bound<'_, PyAny>) -> PyResult<()> {
        copies::copy(target.py(), &End::of(target, true)?, &self.end()?)
    }

    /// Begins a copy of the bytes to the host, after the earlier work of the buffer: `await` gives
    /// them. On a stream of its own, unless one is named.
    #[pyo3(signature = (stream=None))]
    fn download_async(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Download> {
        let (block, range) = self.range()?;
        let device = &block.device;
        let stream = match stream {
            Some(stream) => crate::stream::argument(stream)?.stream().map_err(raise)?.clone(),
            None => {
                recorded::refuse(&[&*block])?;
                let make = || {
                    device.use_streams()?;
                    device.runtime.create_stream()
                };
                py.detach(make).map_err(raise)?
            }
        };
        Download::begin(py, &device.clone(), &stream, block, range)
    }

    /// The bytes of all elements, in the order of the dimensions.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        copies::bytes(py, &self.end()?)
    }

    /// A copy on a device, without gaps: a `Device` or its name.
    fn to<'py>(&self, device: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = device.py();
        let device = state(device)?;
        let pool = device.outside(py, || device.main()).map_err(raise)?;
        copied(py, &pool, &self.end()?)
    }

    /// Frees the memory, of views too. Device memory is reused once the work that uses it is over.
    fn free(&self, py: Python<'_>) -> PyResult<()> {
        let block = self.memory.block.lock().clone();
        if let Some(block) = block.filter(|block| block.in_use().is_none()) {
            block.device.outside(py, || block.wait_for_end()).map_err(raise)?;
        }
        let mut place = self.memory.block.lock();
        let taken = match place.as_ref().and_then(|block| block.in_use()) {
            Some(why) => Err(why),
            None => Ok(place.take()),
        };
        // An exception runs Python code, which may come here again.
        drop(place);
        let refuse = |why| Class::Export.error(format!("the buffer cannot be freed: {why}"));
        let block = taken.map_err(refuse)?;
        self.memory.device.outside(py, || drop(block));
        Ok(())
    }

    /// Waits until the buffer's copies and fills are over.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let block = self.parts()?.0;
        block.device.outside(py, || block.wait()).map_err(raise)
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().parts()?;
        Ok(slf)
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.free(py)
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.layout.shape.first();
        let no_length = || Class::ArgumentType.error("a buffer of no dimensions has no length");
        first.map(|&n| n as usize).ok_or_else(no_length)
    }

    fn __repr__(&self) -> String {
        let Layout { dtype, shape, .. } = &self.layout;
        let freed = if self.freed() { ", freed" } else { "" };
        let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
        format!(
            "Buffer([{}], {}, '{}'{freed})",
            shape.join(", "),
            dtype.name,
            self.memory.device.name
        )
    }

    /// DLPack's type and number of the device.
    fn __dlpack_device__(&self) -> (i32, i32) {
        self.memory.device.dlpack()
    }

    /// A capsule with the memory, as the array API standard says.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<&Bound<'py, PyAny>>,
        copy: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let request = dlpack::Request {
            stream: stream.map(|of| arguments::wide(of, "a stream is a number")).transpose()?,
            max_version: arguments::optional(max_version, "a version is two numbers")?,
            device: arguments::optional(dl_device, "a device of DLPack is two numbers")?,
            copy: arguments::optional(copy, "copy is True, False or None")?,
        };
        dlpack::export(py, self, &request)
    }

    /// The elements as a NumPy array. NumPy calls this where it gets no memory by the buffer
    /// protocol, so it mostly says why.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let view = PyMemoryView::from(slf.as_any())?;
        let arguments = PyDict::new(py);
        arguments.set_item("dtype", dtype)?;
        let make = if copy.is_some() { "array" } else { "asarray" };
        if let Some(copy) = copy {
            arguments.set_item("copy", copy)?;
        }
        py.import("numpy")?.call_method(make, (view,), Some(&arguments))
    }

    /// The CUDA array interface, version 3. The memory then lives as long as the buffer: it cannot
    /// be freed before.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let missing = |text: String| pyo3::exceptions::PyAttributeError::new_err(text);
        let (block, layout) = self.parts()?;
        if block.device.host {
            return Err(missing(format!("{} is no CUDA device", block.device.name)));
        }
        let Some(typestr) = layout.dtype.typestr else {
            return Err(missing(format!("the interface has no name for {}", layout.dtype.name)));
        };
        recorded::refuse(&[&*block])?;
        py.detach(|| block.wait()).map_err(raise)?;
        block.lend();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (block.address(layout.offset), block.read_only))?;
        let strides = if layout.is_dense() { None } else { Some(self.strides(py)?) };
        interface.set_item("strides", strides)?;
        // All submitted work is over, so a consumer waits for no stream.
        interface.set_item("stream", py.None())?;
        Ok(interface)
    }
}
