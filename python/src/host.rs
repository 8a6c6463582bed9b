//! The buffer protocol, both ways: memory of other Python objects, and the type `Buffer`, which
//! lends its own.
//!
//! The stable ABI has the protocol since Python 3.11. Earlier versions export the same functions
//! and take the same slots, with the same struct, so the declarations here are enough for 3.9.

use crate::buffer::Base;
use crate::dtype::{self, DType};
use crate::errors::Class;
use crate::layout::Layout;
use crate::memory::Block;
use leasehold_core::sync::Arc;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
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

/// The memory of another Python object, without gaps between its elements. The object keeps it in
/// place until this is dropped.
pub(crate) struct HostMemory<'py> {
    // On the heap: some exporters point into it.
    buffer: Box<PyBuffer>,
    _attached: PhantomData<Python<'py>>,
}

impl<'py> HostMemory<'py> {
    pub(crate) fn of(object: &Bound<'py, PyAny>, writable: bool) -> PyResult<Self> {
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
        let flags = C_CONTIGUOUS | FORMAT | if writable { WRITABLE } else { 0 };
        // SAFETY: the object is alive and the struct is as CPython has it.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *buffer, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Self { buffer, _attached: PhantomData })
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.buffer.buf.cast()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.buffer.len as u64
    }

    /// The type of the elements, if it has a name here.
    pub(crate) fn dtype(&self) -> Option<DType> {
        if self.buffer.format.is_null() {
            return None;
        }
        // SAFETY: the exporter's format is a C string that lives as long as the request.
        let format = unsafe { CStr::from_ptr(self.buffer.format) };
        dtype::of_format(format.to_bytes(), self.buffer.itemsize as i64)
    }

    pub(crate) fn shape(&self) -> Vec<i64> {
        if self.buffer.shape.is_null() || self.buffer.ndim <= 0 {
            return Vec::new();
        }
        // SAFETY: the exporter filled the shape of so many dimensions, as was asked for.
        let shape =
            unsafe { std::slice::from_raw_parts(self.buffer.shape, self.buffer.ndim as usize) };
        shape.iter().map(|&n| n as i64).collect()
    }
}

impl Drop for HostMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: the struct was filled once and is released once, on a thread that is attached.
        unsafe { PyBuffer_Release(&raw mut *self.buffer) };
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
            "the memory of {} is not the host's; use copy_to, tobytes or DLPack",
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
        return no("the elements have gaps between them".to_owned());
    }
    let format = match (asks(FORMAT), layout.dtype.format) {
        (false, _) => std::ptr::null(),
        (true, Some(format)) => format.as_ptr(),
        (true, None) => {
            let name = layout.dtype.name;
            return no(format!("{name} has no format here; take a view of another type"));
        }
    };
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

/// The type `Buffer`: [`Base`] with the two slots of the protocol.
pub(crate) fn buffer_type(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    let mut slots = [
        ffi::PyType_Slot { slot: GETBUFFER, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: RELEASEBUFFER, pfunc: release_buffer as *mut c_void },
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
