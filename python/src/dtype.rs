//! Types of elements: their names, and what DLPack, the buffer protocol and the array interface
//! call them.

use crate::arguments;
use crate::errors::{Class, invalid};
use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::{PyFloat, PyInt, PyString};
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

/// The type of a format of the buffer protocol, and whether its bytes have another order than this
/// machine's. `None` for what has no type here: objects, records, text, times, pointers.
pub(crate) fn of_format(format: &[u8], size: i64) -> Option<(DType, bool)> {
    let (order, bare) = match format {
        [order @ (b'@' | b'=' | b'<' | b'>' | b'!'), rest @ ..] => (*order, rest),
        all => (b'@', all),
    };
    let code = match bare {
        b"?" => BOOL,
        b"b" | b"h" | b"i" | b"l" | b"q" | b"n" => INT,
        // A `char` is a byte.
        b"c" | b"B" | b"H" | b"I" | b"L" | b"Q" | b"N" => UINT,
        b"e" | b"f" | b"d" => FLOAT,
        b"Zf" | b"Zd" => COMPLEX,
        _ => return None,
    };
    let dtype = find(|row| row.code == code && row.size == size)?;
    Some((dtype, size > 1 && matches!(order, b'>' | b'!')))
}

/// The type of a name of the array interface (`<f8`), and whether its bytes have the other order.
pub(crate) fn of_typestr(typestr: &str) -> Option<(DType, bool)> {
    let (order, rest) = (typestr.get(..1)?, typestr.get(1..)?);
    let kind = |row: &Row| row.typestr.and_then(|own| own.get(1..)) == Some(rest);
    let dtype = find(kind).filter(|_| matches!(order, "<" | ">" | "|" | "="))?;
    Some((dtype, dtype.size > 1 && order == ">"))
}

/// A type that NumPy has through other packages alone, by its name.
pub(crate) fn of_extension(name: &str) -> Option<DType> {
    find(|row| row.format.is_none() && row.name == name)
}

/// Bytes without a meaning.
pub(crate) fn byte() -> DType {
    &ROWS[5]
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

impl PartialEq for Row {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Row {
    /// Bytes of a number: an element, or a part of a complex one.
    pub(crate) fn part(&self) -> usize {
        if self.code == COMPLEX { self.size as usize / 2 } else { self.size as usize }
    }

    /// Writes a number as an element, if it is one of Python's own that fits the most common types:
    /// what [`pack`](Self::pack) writes, in a tenth of its time.
    pub(crate) fn pack_plain(&self, value: &Bound<'_, PyAny>, to: &mut [u8]) -> bool {
        match (self.code, self.size) {
            (FLOAT, 4) => {
                let Ok(value) = value.cast_exact::<PyFloat>() else { return false };
                let (exact, single) = (value.value(), value.value() as f32);
                to.copy_from_slice(&single.to_le_bytes());
                single.is_finite() || !exact.is_finite()
            }
            (INT | UINT, 4) if value.is_exact_instance_of::<PyInt>() => {
                let Ok(number) = value.extract::<i64>() else { return false };
                to.copy_from_slice(&(number as u32).to_le_bytes());
                if self.code == INT {
                    i32::try_from(number).is_ok()
                } else {
                    u32::try_from(number).is_ok()
                }
            }
            _ => false,
        }
    }

    /// The bytes of a Python number as an element.
    pub(crate) fn pack(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
        let what = format!("a value for elements of {}", self.name);
        let refuse = || invalid(format!("{what}: it does not fit"));
        match self.code {
            BOOL => {
                let truth = value.is_truthy()?;
                if value.eq(truth)? { Ok(vec![u8::from(truth)]) } else { Err(refuse()) }
            }
            INT => {
                let number: i64 = arguments::value(value, &what)?;
                let unused = 64 - 8 * self.size as u32;
                let fits = number << unused >> unused == number;
                self.low_bytes(number as u64, fits).ok_or_else(refuse)
            }
            UINT => {
                let number: u64 = arguments::value(value, &what)?;
                let unused = 64 - 8 * self.size as u32;
                let fits = number << unused >> unused == number;
                self.low_bytes(number, fits).ok_or_else(refuse)
            }
            FLOAT | BFLOAT => {
                // NumPy's complex numbers turn into real ones, with a warning.
                let imaginary = value.getattr("imag");
                if imaginary.and_then(|part| part.ne(0)).unwrap_or(false) {
                    return Err(Class::ArgumentType.error(format!("{what}: it is complex")));
                }
                self.float(arguments::value(value, &what)?).ok_or_else(refuse)
            }
            COMPLEX => {
                let part = |name| {
                    let part = value.getattr(name).map_err(|error| {
                        let own = Class::ArgumentType.error(format!("{what}: it is no number"));
                        arguments::because(value.py(), own, error)
                    })?;
                    self.float(arguments::value(&part, &what)?).ok_or_else(refuse)
                };
                Ok([part("real")?, part("imag")?].concat())
            }
            _ => Err(invalid(format!(
                "no number is turned into {}; fill a view as uint8",
                self.name
            ))),
        }
    }

    fn low_bytes(&self, number: u64, fits: bool) -> Option<Vec<u8>> {
        fits.then(|| number.to_le_bytes()[..self.size as usize].to_vec())
    }

    /// The bytes of a number, unless it is beyond the type's greatest.
    fn float(&self, x: f64) -> Option<Vec<u8>> {
        let (bytes, is_finite) = match (self.code, self.part()) {
            (BFLOAT, _) => {
                let x = bf16::from_f64(x);
                (x.to_le_bytes().to_vec(), x.is_finite())
            }
            (_, 2) => {
                let x = f16::from_f64(x);
                (x.to_le_bytes().to_vec(), x.is_finite())
            }
            (_, 4) => ((x as f32).to_le_bytes().to_vec(), (x as f32).is_finite()),
            _ => (x.to_le_bytes().to_vec(), x.is_finite()),
        };
        (is_finite || !x.is_finite()).then_some(bytes)
    }
}
