//! Takes the place of the C library's functions that change files, in a process that loads this library by `LD_PRELOAD`.
//! What the process does to the files of its SQLite store is counted and recorded, and the process is killed after a
//! chosen step.
//!
//! Three variables of the environment name files:
//! * `WRITE_LOG_STORE`: the store. Steps count if they concern the store's directory, or a file whose name begins with
//!   the store's. The shared memory, the lock and the reserve do not count: they need not survive.
//! * `WRITE_LOG_FILE`: where steps are appended; `tests/crash_points/sqlite/write_log.rs` reads them.
//! * `WRITE_LOG_CONTROL`: four numbers of eight bytes, in shared memory: how many steps there were, after which step
//!   the process is killed (0: none), which syncs fail (0: none, 1: of the store's file itself, 2: of its log), and how
//!   many microseconds a sync takes.
//!
//! Files are not synced in fact, because the machine goes on running. A sync is recorded at its end, with the number of
//! steps before its beginning: what was written meanwhile may not be on the disk.
//!
//! # Safety
//! The functions have the signatures of the C library and pass their arguments to the system call of the same name. They
//! use neither the heap nor the standard library's files, so that they can be called at any time. `open` and `openat` take
//! a variable number of arguments in C; on Linux, on x86-64 and AArch64, these are passed as those of other functions.

use std::{
    ffi::{CStr, c_char, c_int, c_long, c_void},
    ptr, slice,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use libc::{
    AT_FDCWD, EIO, MAP_FAILED, MAP_SHARED, O_APPEND, O_CLOEXEC, O_CREAT, O_RDWR, O_WRONLY,
    PROT_READ, PROT_WRITE, SEEK_CUR, SIGKILL, SYS_faccessat, SYS_fdatasync, SYS_fsync,
    SYS_ftruncate, SYS_lseek, SYS_openat, SYS_pwrite64, SYS_readlinkat, SYS_unlinkat, SYS_write,
    mode_t, off_t, size_t, ssize_t, syscall,
};

/// What follows the name of the store in names of files that do not count.
const TEMPORARY: [&[u8]; 3] = [b"-shm", b".lock", b"-reserve"];
/// Limit of the length of paths.
const PATH: usize = 4_096;

/// What is recorded.
#[derive(Clone, Copy)]
enum Step<'a> {
    Create,
    Write(i64, &'a [u8]),
    Truncate(i64),
    Sync(i64),
    FailedSync(i64),
    Unlink,
    SyncDirectory,
}

/// The numbers of the control file.
#[repr(C)]
struct Control {
    steps: AtomicU64,
    kill_after: AtomicU64,
    fail_syncs: AtomicU64,
    sync_micros: AtomicU64,
}

struct Recording {
    store: &'static [u8],
    directory: &'static [u8],
    log: c_int,
    control: &'static Control,
    /// True while a step is under way. A lock of the standard library could not be taken in a signal handler.
    busy: AtomicBool,
}

/// Returns the recording. `None` in a process whose environment asks for none.
fn recording() -> Option<&'static Recording> {
    static RECORDING: OnceLock<Option<Recording>> = OnceLock::new();
    RECORDING.get_or_init(Recording::start).as_ref()
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: nothing changes the environment of the processes that are recorded.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    // SAFETY: as above; the value ends with a zero.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

impl Recording {
    fn start() -> Option<Self> {
        let store = variable(c"WRITE_LOG_STORE")?.to_bytes();
        let open = |name, flags: c_int| {
            let path = variable(name)?;
            // SAFETY: the path ends with a zero.
            let file = unsafe {
                syscall(SYS_openat, AT_FDCWD, path.as_ptr(), flags | O_CLOEXEC, 0o600 as mode_t)
            };
            c_int::try_from(file).ok().filter(|file| *file >= 0)
        };
        let log = open(c"WRITE_LOG_FILE", O_CREAT | O_WRONLY | O_APPEND)?;
        let control = open(c"WRITE_LOG_CONTROL", O_RDWR)?;
        let size = size_of::<Control>();
        // SAFETY: a new mapping of a file that is long enough.
        let mapped = unsafe {
            libc::mmap(ptr::null_mut(), size, PROT_READ | PROT_WRITE, MAP_SHARED, control, 0)
        };
        if mapped == MAP_FAILED {
            return None;
        }
        // SAFETY: mappings begin at pages, the numbers are atomic, and nothing removes the mapping.
        let control = unsafe { &*mapped.cast::<Control>() };
        let end = store.iter().rposition(|byte| *byte == b'/')?;
        Some(Self { store, directory: &store[..end], log, control, busy: AtomicBool::new(false) })
    }

    /// Returns what follows the store's name in the name of a file that counts.
    fn suffix<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        path.strip_prefix(self.store).filter(|suffix| !TEMPORARY.contains(suffix))
    }

    /// Does a step with a file and records it, if it counts and succeeds.
    fn step<'a>(
        &self,
        suffix: &[u8],
        act: impl FnOnce() -> c_long,
        step: impl FnOnce(c_long) -> Option<Step<'a>>,
    ) -> c_long {
        while self.busy.swap(true, Ordering::Acquire) {
            std::hint::spin_loop();
        }
        let result = act();
        if let Some(step) = (result >= 0).then(|| step(result)).flatten() {
            self.record(suffix, step);
            let steps = self.control.steps.fetch_add(1, Ordering::SeqCst) + 1;
            if steps == self.control.kill_after.load(Ordering::SeqCst) {
                // SAFETY: a call without memory.
                unsafe { libc::kill(libc::getpid(), SIGKILL) };
                loop {
                    std::hint::spin_loop(); // the other threads end too, without another step
                }
            }
        }
        self.busy.store(false, Ordering::Release);
        result
    }

    fn record(&self, suffix: &[u8], step: Step<'_>) {
        let (kind, number, bytes): (u8, i64, &[u8]) = match step {
            Step::Create => (0, 0, &[]),
            Step::Write(offset, bytes) => (1, offset, bytes),
            Step::Truncate(length) => (2, length, &[]),
            Step::Sync(begun) => (3, begun, &[]),
            Step::Unlink => (4, 0, &[]),
            Step::SyncDirectory => (5, 0, &[]),
            Step::FailedSync(begun) => (6, begun, &[]),
        };
        let mut head = [0; 14 + 64];
        head[0] = kind;
        head[1] = suffix.len() as u8;
        head[2..10].copy_from_slice(&number.to_le_bytes());
        head[10..14].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        head[14..14 + suffix.len()].copy_from_slice(suffix);
        for part in [&head[..14 + suffix.len()], bytes] {
            // SAFETY: the memory is that of a slice.
            unsafe { syscall(SYS_write, self.log, part.as_ptr(), part.len()) };
        }
    }
}

/// Calls `with` with the recording and the path of an open file, if there is a recording and the file has a path.
fn with_path<T>(file: c_int, with: impl FnOnce(&Recording, &[u8]) -> Option<T>) -> Option<T> {
    let recording = recording()?;
    let mut name = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = file.checked_ilog10().map_or(1, |log| log as usize + 1);
    let (mut at, mut rest) = (14 + digits, file);
    while digits > 0 {
        at -= 1;
        digits -= 1;
        name[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let mut path = [0_u8; PATH];
    // SAFETY: the name ends with a zero, and the length is that of the array.
    let length =
        unsafe { syscall(SYS_readlinkat, AT_FDCWD, name.as_ptr(), path.as_mut_ptr(), PATH) };
    let length = usize::try_from(length).ok()?;
    with(recording, &path[..length])
}

/// Does a step with an open file, recorded if it counts.
fn file_step<'a>(
    file: c_int,
    act: impl Fn() -> c_long,
    step: impl FnOnce(c_long) -> Option<Step<'a>>,
) -> c_long {
    let done = with_path(file, |recording, path| {
        Some(recording.step(recording.suffix(path)?, &act, step))
    });
    done.unwrap_or_else(act)
}

/// Returns what a function returns that fails.
fn fail(error: c_int) -> c_long {
    // SAFETY: each thread has its own number.
    unsafe { *libc::__errno_location() = error };
    -1
}

fn sync(file: c_int, number: c_long) -> c_int {
    let done = with_path(file, |recording, path| {
        if path == recording.directory {
            return Some(recording.step(b"", || 0, |_| Some(Step::SyncDirectory)));
        }
        let suffix = recording.suffix(path)?;
        let begun = recording.control.steps.load(Ordering::SeqCst) as i64;
        let micros = recording.control.sync_micros.load(Ordering::SeqCst);
        // SAFETY: a call without memory.
        unsafe { libc::usleep(micros as libc::useconds_t) };
        let fails = match recording.control.fail_syncs.load(Ordering::SeqCst) {
            0 => false,
            1 => suffix.is_empty(),
            _ => suffix == b"-wal",
        };
        let step = if fails { Step::FailedSync(begun) } else { Step::Sync(begun) };
        let done = recording.step(suffix, || 0, |_| Some(step));
        Some(if fails { fail(EIO) } else { done })
    });
    // SAFETY: a call without memory.
    done.unwrap_or_else(|| unsafe { syscall(number, file) }) as c_int
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, bytes: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: as the caller says.
    let act = || unsafe { syscall(SYS_write, file, bytes, length) };
    let step = |written: c_long| {
        // SAFETY: a call without memory.
        let after = unsafe { syscall(SYS_lseek, file, 0, SEEK_CUR) };
        // SAFETY: so many bytes were read from there just now.
        let bytes = unsafe { slice::from_raw_parts(bytes.cast(), written as usize) };
        Some(Step::Write(after - written, bytes))
    };
    file_step(file, act, step) as ssize_t
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(
    file: c_int,
    bytes: *const c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: as the caller says.
    let act = || unsafe { syscall(SYS_pwrite64, file, bytes, length, offset) };
    let step = |written: c_long| {
        // SAFETY: so many bytes were read from there just now.
        let bytes = unsafe { slice::from_raw_parts(bytes.cast(), written as usize) };
        Some(Step::Write(offset, bytes))
    };
    file_step(file, act, step) as ssize_t
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite(
    file: c_int,
    bytes: *const c_void,
    length: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: as the caller says.
    unsafe { pwrite64(file, bytes, length, offset) }
}

/// Truncates a file.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate64(file: c_int, length: off_t) -> c_int {
    // SAFETY: a call without memory.
    let act = || unsafe { syscall(SYS_ftruncate, file, length) };
    file_step(file, act, |_| Some(Step::Truncate(length))) as c_int
}

/// Truncates a file.
#[unsafe(no_mangle)]
pub extern "C" fn ftruncate(file: c_int, length: off_t) -> c_int {
    ftruncate64(file, length)
}

/// Syncs a file.
#[unsafe(no_mangle)]
pub extern "C" fn fsync(file: c_int) -> c_int {
    sync(file, SYS_fsync)
}

/// Syncs a file.
#[unsafe(no_mangle)]
pub extern "C" fn fdatasync(file: c_int) -> c_int {
    sync(file, SYS_fdatasync)
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    // SAFETY: as the caller says.
    let act = || unsafe { syscall(SYS_unlinkat, AT_FDCWD, path, 0) };
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let done = recording().and_then(|recording| {
        let suffix = recording.suffix(name)?;
        Some(recording.step(suffix, act, |_| Some(Step::Unlink)))
    });
    done.unwrap_or_else(act) as c_int
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: as the caller says.
    let act = || unsafe { syscall(SYS_openat, directory, path, flags, mode) };
    if flags & O_CREAT == 0 {
        return act() as c_int;
    }
    // SAFETY: as the caller says.
    let name = unsafe { CStr::from_ptr(path) }.to_bytes();
    let done = recording().and_then(|recording| {
        let suffix = recording.suffix(name)?;
        // SAFETY: as the caller says.
        let existed = unsafe { syscall(SYS_faccessat, directory, path, 0) } == 0;
        Some(recording.step(suffix, act, |_| (!existed).then_some(Step::Create)))
    });
    done.unwrap_or_else(act) as c_int
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat(
    directory: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: as the caller says.
    unsafe { openat64(directory, path, flags, mode) }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: as the caller says.
    unsafe { openat64(AT_FDCWD, path, flags, mode) }
}

/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    // SAFETY: as the caller says.
    unsafe { openat64(AT_FDCWD, path, flags, mode) }
}
