//! Types of elements: their names, and what DLPack, the buffer protocol and the array interface
//! call them.

use crate::errors::invalid;
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::ffi::CStr;

/// The kinds of DLPack (`DLDataTypeCode`).
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;
const FLOAT8_E4M3FN: u8 = 10;
const FLOAT8_E5M2: u8 = 12;

/// A type of elements.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// DLPack's kind.
    pub(crate) code: u8,
    /// Bytes of an element.
    pub(crate) size: i64,
    /// The buffer protocol's format, if it has one.
    pub(crate) format: Option<&'static CStr>,
    /// The array interface's name, if it has one.
    pub(crate) typestr: Option<&'static str>,
}

/// A type of elements.
pub(crate) type DType = &'static Row;

const fn row(
    name: &'static str,
    code: u8,
    size: i64,
    format: &'static CStr,
    typestr: &'static str,
) -> Row {
    Row { name, code, size, format: Some(format), typestr: Some(typestr) }
}

const fn unnamed(name: &'static str, code: u8, size: i64) -> Row {
    Row { name, code, size, format: None, typestr: None }
}

static ROWS: [Row; 17] = [
    row("bool", BOOL, 1, c"?", "|b1"),
    row("int8", INT, 1, c"b", "|i1"),
    row("int16", INT, 2, c"h", "<i2"),
    row("int32", INT, 4, c"i", "<i4"),
    row("int64", INT, 8, c"q", "<i8"),
    row("uint8", UINT, 1, c"B", "|u1"),
    row("uint16", UINT, 2, c"H", "<u2"),
    row("uint32", UINT, 4, c"I", "<u4"),
    row("uint64", UINT, 8, c"Q", "<u8"),
    row("float16", FLOAT, 2, c"e", "<f2"),
    row("float32", FLOAT, 4, c"f", "<f4"),
    row("float64", FLOAT, 8, c"d", "<f8"),
    row("complex64", COMPLEX, 8, c"Zf", "<c8"),
    row("complex128", COMPLEX, 16, c"Zd", "<c16"),
    unnamed("bfloat16", BFLOAT, 2),
    unnamed("float8_e4m3fn", FLOAT8_E4M3FN, 1),
    unnamed("float8_e5m2", FLOAT8_E5M2, 1),
];

fn find(of: impl Fn(&Row) -> bool) -> Option<DType> {
    ROWS.iter().find(|row| of(row))
}

/// The type of DLPack's numbers.
pub(crate) fn of_dlpack(code: u8, bits: u8) -> Option<DType> {
    find(|row| row.code == code && row.size * 8 == i64::from(bits))
}

/// The type of a format of the buffer protocol; `None` for bytes without a meaning, and for types
/// that have no name here.
pub(crate) fn of_format(format: &[u8], size: i64) -> Option<DType> {
    let bare = match format {
        // Another order of bytes than this machine's.
        [b'>' | b'!', ..] if size > 1 => return None,
        [b'@' | b'=' | b'<' | b'>' | b'!', rest @ ..] => rest,
        all => all,
    };
    let code = match bare {
        b"?" => BOOL,
        b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => INT,
        b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" => UINT,
        b"e" | b"f" | b"d" => FLOAT,
        b"Zf" | b"Zd" => COMPLEX,
        _ => return None,
    };
    find(|row| row.code == code && row.size == size)
}

/// The type that a Python object names: a name, or a type of NumPy's or PyTorch's.
pub(crate) fn parse(of: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text = if of.is_instance_of::<PyString>() {
        of.str()?
    } else {
        let name = of.getattr("name").or_else(|_| of.getattr("__name__"));
        name.unwrap_or_else(|_| of.clone()).str()?
    };
    let text = text.to_string();
    let name = text.strip_prefix("torch.").unwrap_or(&text);
    find(|row| row.name == name).ok_or_else(|| {
        let known: Vec<_> = ROWS.iter().map(|row| row.name).collect();
        invalid(format!("{name:?} is no type of elements; known are {}", known.join(", ")))
    })
}

impl Row {
    /// The bytes of a Python number as an element.
    pub(crate) fn pack(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        let py = value.py();
        let float = |value: Bound<'_, PyAny>| value.extract::<f64>();
        match self.code {
            BOOL => Ok(vec![u8::from(value.is_truthy()?)]),
            INT | UINT => {
                let number = py.import("operator")?.call_method1("index", (value,))?;
                let signed = PyDict::new(py);
                signed.set_item("signed", self.code == INT)?;
                let bytes = number.call_method("to_bytes", (self.size, "little"), Some(&signed));
                Ok(bytes?.cast_into::<PyBytes>()?.as_bytes().to_vec())
            }
            FLOAT | BFLOAT => {
                let x = float(value.clone())?;
                Ok(match (self.code, self.size) {
                    (BFLOAT, _) => bf16::from_f64(x).to_le_bytes().to_vec(),
                    (_, 2) => f16::from_f64(x).to_le_bytes().to_vec(),
                    (_, 4) => (x as f32).to_le_bytes().to_vec(),
                    _ => x.to_le_bytes().to_vec(),
                })
            }
            COMPLEX => {
                let parts = [float(value.getattr("real")?)?, float(value.getattr("imag")?)?];
                Ok(parts
                    .into_iter()
                    .flat_map(|x| match self.size {
                        8 => (x as f32).to_le_bytes().to_vec(),
                        _ => x.to_le_bytes().to_vec(),
                    })
                    .collect())
            }
            _ => Err(invalid(format!(
                "no number is turned into {}; fill a view as uint8",
                self.name
            ))),
        }
    }
}
