//! The buffer protocol, both ways: memory of other Python objects, and the type `Buffer`, which
//! lends its own.
//!
//! The stable ABI has the protocol since Python 3.11. Earlier versions export the same functions
//! and take the same slots, with the same struct, so the declarations here are enough for 3.9.

use crate::arguments::{self, because};
use crate::buffer::Base;
use crate::dtype::{self, DType};
use crate::errors::{Class, invalid, is_refusal, raise};
use crate::grid::Grid;
use crate::layout::{self, Layout, MOST_DIMENSIONS};
use crate::memory::Block;
use crate::recorded;
use leasehold_core::sync::Arc;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;

/// `Py_buffer`, the same in all versions of CPython from 3.9 on.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(of: *mut ffi::PyObject, to: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(of: *mut PyBuffer);
}

// The flags of a request, and the numbers of the slots.
const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const ND: c_int = 0x8;
const STRIDES: c_int = 0x10 | ND;
const C_CONTIGUOUS: c_int = 0x20 | STRIDES;
const F_CONTIGUOUS: c_int = 0x40 | STRIDES;
const ANY_CONTIGUOUS: c_int = 0x80 | STRIDES;
const GETBUFFER: c_int = 1;
const RELEASEBUFFER: c_int = 2;
const DOC: c_int = 56;
const FREE: c_int = 74;

/// The docstring of `Buffer`.
const ABOUT: &CStr = c"The elements of an array in a device's memory: type, shape, strides.

`Device.empty`, `zeros` and `upload` make one, and `from_dlpack` of another library's array. Memory
goes with the last reference, or with `free` and the end of a `with` block; views are freed together.
A method that reads or writes the elements comes after the work that streams do with them.

Examples
--------
>>> import leasehold
>>> with leasehold.Device(\"cpu:0\").zeros((2, 3), \"float32\") as buffer:
...     buffer.fill(1.5)
...     buffer.shape, buffer.nbytes, memoryview(buffer)[1, 2]
((2, 3), 24, 1.5)";

/// A request for the memory of another Python object, which keeps it in place until this is
/// dropped.
pub(crate) struct Request<'py> {
    // On the heap: some exporters point into it.
    buffer: Box<PyBuffer>,
    _attached: PhantomData<Python<'py>>,
}

impl<'py> Request<'py> {
    /// Asks for elements at any strides.
    ///
    /// # Errors
    /// `InvalidArgumentError` if the memory was to be writable and is not. Else the object's own.
    pub(crate) fn of(object: &Bound<'py, PyAny>, writable: bool) -> PyResult<Self> {
        let flags = STRIDES | FORMAT;
        if !writable {
            return Self::new(object, flags);
        }
        Self::new(object, flags | WRITABLE).map_err(|error| match Self::new(object, flags) {
            Ok(_) => because(object.py(), invalid("the target is read-only"), error),
            Err(_) => error,
        })
    }

    fn new(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut buffer = Box::new(PyBuffer {
            buf: std::ptr::null_mut(),
            obj: std::ptr::null_mut(),
            len: 0,
            itemsize: 0,
            readonly: 0,
            ndim: 0,
            format: std::ptr::null_mut(),
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
        });
        // SAFETY: the object is alive and the struct is as CPython has it.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *buffer, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { buffer, _attached: PhantomData })
    }

    fn format(&self) -> &[u8] {
        if self.buffer.format.is_null() {
            return b"B";
        }
        // SAFETY: the exporter's format is a C string that lives as long as the request.
        unsafe { CStr::from_ptr(self.buffer.format) }.to_bytes()
    }

    /// A list of the exporter's with a number for each dimension.
    fn list(&self, of: *const isize) -> Option<Vec<i64>> {
        let count = usize::try_from(self.buffer.ndim).ok()?;
        match count {
            0 => Some(Vec::new()),
            _ if of.is_null() || count > MOST_DIMENSIONS => None,
            // SAFETY: the exporter filled a list of so many dimensions, as was asked for.
            _ => Some(
                unsafe { std::slice::from_raw_parts(of, count) }
                    .iter()
                    .map(|&n| n as i64)
                    .collect(),
            ),
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        // SAFETY: the struct was filled once and is released once, on a thread that is attached.
        unsafe { PyBuffer_Release(&raw mut *self.buffer) };
    }
}

/// Elements in host memory, at any strides.
pub(crate) struct HostArray<'py> {
    pub(crate) grid: Grid,
    pub(crate) dtype: DType,
    /// Whether the bytes of a number have another order than this machine's.
    pub(crate) swapped: bool,
    pub(crate) read_only: bool,
    keeper: Keeper<'py>,
}

/// The object that keeps the memory in place.
enum Keeper<'py> {
    Request { _request: Request<'py> },
    Block { block: Arc<Block> },
}

impl<'py> HostArray<'py> {
    /// The elements of a request's memory.
    ///
    /// # Errors
    /// `ArgumentTypeError` for elements without a type here.
    pub(crate) fn new(request: Request<'py>) -> PyResult<Self> {
        let (format, size) = (request.format(), request.buffer.itemsize as i64);
        let Some((dtype, swapped)) = dtype::of_format(format, size) else {
            let is_text = matches!(format.last(), Some(b'w' | b'u' | b's' | b'c' | b'p'));
            let cure = if is_text {
                "they are text: encode it and pass the bytes, or take a view as uint8"
            } else if format.contains(&b'O') {
                "Python objects have no bytes that other memory could hold"
            } else {
                "take one field of numbers, or a view as uint8 for the bytes as they are"
            };
            return Err(Class::ArgumentType.error(format!(
                "elements of the format {:?}, of {size} bytes, have no type here; {cure}",
                String::from_utf8_lossy(format)
            )));
        };
        let no_grid = || Class::Export.error("the array's memory is no grid of elements");
        if !request.buffer.suboffsets.is_null() {
            return Err(no_grid());
        }
        let shape = request.list(request.buffer.shape).filter(|s| s.iter().all(|&n| n >= 0));
        let shape = shape.ok_or_else(no_grid)?;
        let strides = match request.buffer.strides {
            // Some exporters say so that there are no gaps, as if none had been asked for.
            strides if strides.is_null() => Layout::dense(dtype, shape.clone(), 0)?.byte_strides(),
            strides => request.list(strides).ok_or_else(no_grid)?,
        };
        layout::elements(&shape, dtype)?;
        let grid = Grid { first: request.buffer.buf.cast(), shape, strides, size };
        let read_only = request.buffer.readonly != 0;
        let keeper = Keeper::Request { _request: request };
        Ok(Self { grid, dtype, swapped, read_only, keeper })
    }

    /// The elements that an array interface describes, in an object with the buffer protocol.
    /// `None` if it names an address: nobody vouches for that.
    pub(crate) fn of_interface(
        object: &Bound<'py, PyAny>,
        writable: bool,
    ) -> PyResult<Option<Self>> {
        const WHAT: &str = "an array interface";
        let interface = object.getattr("__array_interface__");
        let Some(interface) = interface.ok().and_then(|i| i.cast_into::<PyDict>().ok()) else {
            return Ok(None);
        };
        let given = |name| interface.get_item(name).map(|item| item.filter(|i| !i.is_none()));
        let missing = |name| Class::ArgumentType.error(format!("{WHAT} without {name}"));
        let Some(data) = given("data")?.filter(|data| !data.is_instance_of::<PyTuple>()) else {
            return Ok(None);
        };
        if given("mask")?.is_some() {
            return Err(Class::ArgumentType.error("an array with a mask has no type here"));
        }
        let typestr = given("typestr")?.ok_or_else(|| missing("typestr"))?;
        let typestr: String = arguments::value(&typestr, WHAT)?;
        let (dtype, swapped) = dtype::of_typestr(&typestr).ok_or_else(|| {
            let text = format!("elements of the type {typestr:?} have no type here");
            Class::ArgumentType.error(text)
        })?;
        let shape = arguments::shape(&given("shape")?.ok_or_else(|| missing("shape"))?)?;
        let mut strides = Layout::dense(dtype, shape.clone(), 0)?.byte_strides();
        if let Some(all) = given("strides")? {
            let all = arguments::numbers(&all, WHAT)?;
            if all.len() != shape.len() {
                return Err(invalid(format!("{WHAT} with {} strides", all.len())));
            }
            strides = all;
        }
        let offset = given("offset")?.map(|offset| arguments::value(&offset, WHAT));
        let offset: i64 = offset.transpose()?.unwrap_or(0);
        let mut array = match Request::of(&data, writable) {
            Ok(request) => Self::new(request)?,
            Err(error) if is_refusal(object.py(), &error) => return Ok(None),
            Err(error) => return Err(error),
        };
        let bytes = Layout::dense(array.dtype, array.grid.shape.clone(), 0)?.bytes();
        let grid = Grid { first: array.grid.first, shape, strides, size: dtype.size };
        if !array.grid.is_dense() || !grid.lies_in(offset, bytes) {
            return Err(invalid(format!("{WHAT} whose elements lie beyond its data")));
        }
        array.grid = Grid { first: grid.first.wrapping_offset(offset as isize), ..grid };
        (array.dtype, array.swapped) = (dtype, swapped);
        Ok(Some(array))
    }

    /// The elements of a block of host memory.
    pub(crate) fn of_block(block: Arc<Block>, layout: Layout) -> Self {
        let grid = Grid {
            first: block.host_address(layout.offset),
            strides: layout.byte_strides(),
            shape: layout.shape,
            size: layout.dtype.size,
        };
        let read_only = block.read_only;
        let keeper = Keeper::Block { block };
        Self { grid, dtype: layout.dtype, swapped: false, read_only, keeper }
    }

    /// The block whose memory it is.
    pub(crate) fn block(&self) -> Option<&Block> {
        match &self.keeper {
            Keeper::Request { .. } => None,
            Keeper::Block { block } => Some(block),
        }
    }

    /// Whether the bytes are those of elements without gaps, in this machine's order.
    pub(crate) fn is_plain(&self) -> bool {
        !self.swapped && self.grid.is_dense()
    }

    /// Checks that each element can be written on its own.
    pub(crate) fn check_target(&self) -> PyResult<()> {
        if self.read_only {
            return Err(invalid("the memory is read-only and cannot be written"));
        }
        if self.grid.may_overlap() {
            return Err(invalid(
                "elements of the target share memory; copy to an array of its own",
            ));
        }
        Ok(())
    }

    /// Sets every element, whose bytes are in this machine's order.
    pub(crate) fn fill(&self, py: Python<'_>, element: &[u8]) -> PyResult<()> {
        self.check_target()?;
        if let Some(block) = self.block() {
            recorded::refuse(&[block])?;
            let bytes = Layout::dense(self.dtype, self.grid.shape.clone(), 0)?.bytes();
            block.settle_to_write(py, bytes).map_err(raise)?;
        }
        assert_eq!(element.len() as i64, self.grid.size);
        // SAFETY: the memory stays in place as long as this, and the thread is attached.
        unsafe { self.grid.fill(element) };
        Ok(())
    }
}

/// The memory that a request of the protocol points to.
struct Lent {
    block: Arc<Block>,
    layout: Layout,
    shape: Vec<isize>,
    strides: Vec<isize>,
}

/// Fills a request for the memory of a `Buffer`.
///
/// # Safety
/// - `of` is an instance of `Buffer`, and `to` can be written.
unsafe fn lend(of: *mut ffi::PyObject, to: *mut PyBuffer, flags: c_int) -> PyResult<()> {
    // SAFETY: CPython calls the slot on a thread that is attached.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: CPython passes an object that is alive, and one of the slot's own type.
    let buffer = unsafe { Bound::from_borrowed_ptr(py, of) };
    let buffer = buffer.cast_into::<Base>()?;
    let (block, layout) = buffer.get().parts()?;
    let no = |text: String| Err(Class::Export.error(text));
    if !block.device.host {
        return no(format!(
            "the memory of {} is not the host's; use tobytes, copy_to, DLPack, or to(\"cpu:0\")",
            block.device.name
        ));
    }
    if flags & WRITABLE != 0 && block.read_only {
        return no("the memory is read-only".to_owned());
    }
    let asks = |what: c_int| flags & what == what;
    let by_columns = layout.is_dense_by_columns();
    let fits = if asks(C_CONTIGUOUS) || !asks(STRIDES) {
        layout.is_dense()
    } else if asks(F_CONTIGUOUS) {
        by_columns
    } else if asks(ANY_CONTIGUOUS) {
        by_columns || layout.is_dense()
    } else {
        true
    };
    if !fits {
        return no("the elements have gaps between them, and none were asked for".to_owned());
    }
    let format = match (asks(FORMAT), layout.dtype.format) {
        (false, _) => std::ptr::null(),
        (true, Some(format)) => format.as_ptr(),
        (true, None) => {
            let name = layout.dtype.name;
            let bits = layout.dtype.size * 8;
            return no(format!(
                "{name} has no format here; use tobytes, DLPack, or view(\"uint{bits}\")"
            ));
        }
    };
    recorded::settle(py, &[&*block])?;
    let address = block.host_address(layout.offset);
    let strides = layout.byte_strides().iter().map(|&s| s as isize).collect();
    let shape = layout.shape.iter().map(|&n| n as isize).collect();
    block.begin_export();
    let mut lent = Box::new(Lent { block, layout, shape, strides });
    let request = PyBuffer {
        buf: address.cast(),
        obj: buffer.into_ptr(),
        len: lent.layout.bytes() as isize,
        itemsize: lent.layout.dtype.size as isize,
        readonly: c_int::from(lent.block.read_only),
        ndim: lent.layout.shape.len() as c_int,
        format: format.cast_mut(),
        shape: if asks(ND) { lent.shape.as_mut_ptr() } else { std::ptr::null_mut() },
        strides: if asks(STRIDES) { lent.strides.as_mut_ptr() } else { std::ptr::null_mut() },
        suboffsets: std::ptr::null_mut(),
        internal: Box::into_raw(lent).cast(),
    };
    // SAFETY: the caller says that it can be written; the former contents own nothing.
    unsafe { to.write(request) };
    Ok(())
}

/// The slot `bf_getbuffer`.
///
/// # Safety
/// - As CPython calls it.
unsafe extern "C" fn get_buffer(of: *mut ffi::PyObject, to: *mut PyBuffer, flags: c_int) -> c_int {
    // SAFETY: CPython passes an instance of the type and a struct to fill.
    match unsafe { lend(of, to, flags) } {
        Ok(()) => 0,
        Err(error) => {
            // SAFETY: CPython calls the slot on a thread that is attached, and asks for null.
            unsafe { (*to).obj = std::ptr::null_mut() };
            // SAFETY: the same thread.
            error.restore(unsafe { Python::assume_attached() });
            -1
        }
    }
}

/// The slot `bf_releasebuffer`.
///
/// # Safety
/// - As CPython calls it.
unsafe extern "C" fn release_buffer(_: *mut ffi::PyObject, of: *mut PyBuffer) {
    // SAFETY: CPython releases each request once, and `lend` made what it points to.
    let lent = unsafe { Box::from_raw((*of).internal.cast::<Lent>()) };
    lent.block.end_export();
}

/// The slot `tp_free`. No other type has this function, so CPython refuses to change an instance's
/// class. Another class would not be told of the end of a request that lives.
///
/// # Safety
/// - As CPython calls it.
unsafe extern "C" fn free(object: *mut c_void) {
    // SAFETY: an object of a type with garbage collection has its allocator, all others have the
    // plain one. The type outlives the object.
    unsafe {
        let flags = ffi::PyType_GetFlags(ffi::Py_TYPE(object.cast()));
        if flags & ffi::Py_TPFLAGS_HAVE_GC == 0 {
            ffi::PyObject_Free(object);
        } else {
            ffi::PyObject_GC_Del(object);
        }
    }
}

/// The type `Buffer`: [`Base`] with the two slots of the protocol.
pub(crate) fn buffer_type(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    let mut slots = [
        ffi::PyType_Slot { slot: GETBUFFER, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: RELEASEBUFFER, pfunc: release_buffer as *mut c_void },
        ffi::PyType_Slot { slot: DOC, pfunc: ABOUT.as_ptr().cast_mut().cast() },
        ffi::PyType_Slot { slot: FREE, pfunc: free as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"leasehold.Buffer".as_ptr(),
        // As the base's.
        basicsize: 0,
        itemsize: 0,
        flags: ffi::Py_TPFLAGS_DEFAULT as _,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [py.get_type::<Base>()])?;
    // SAFETY: the name lives forever; CPython copies the rest. The slots have the protocol's types.
    let made = unsafe {
        let made = ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr());
        Bound::from_owned_ptr_or_err(py, made)?
    };
    Ok(made.cast_into::<PyType>()?)
}
