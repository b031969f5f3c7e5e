/* Fails calls that change files, for tests; to be preloaded (LD_PRELOAD).
 *
 * FAULTS is a list of NAME=VALUE, separated by newlines:
 *   folder   only calls on files below this path count
 *   exact    1: only calls on this folder itself
 *   command  only in processes whose command line contains this text
 *   calls    only these calls, separated by commas; all without it
 *   first    the number of the first call that fails, from 1; none without it
 *   count    how many calls in a row fail, 1 without it
 *   errno    the error, a number
 *   done     1: the call is carried out and its error reported all the same
 *   kill     1: the process is killed at the call (after it, with done) instead
 *   log      a line per call is appended to this file: PID NUMBER CALL PATH
 *   record   the calls with their data are appended to this file, for tests/fakes/power_loss.py
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], calls[512];
static long first, times = 1, error_number = EIO, done_first, to_kill, exact;
static int log_file = -1, record_file = -1, chosen;
static atomic_long counter;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *value_of(const char *settings, const char *name, char *into, size_t size) {
    size_t length = strlen(name);
    for (const char *line = settings; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (!strncmp(line, name, length) && line[length] == '=') {
            size_t end = strcspn(line += length + 1, "\n");
            if (end >= size) end = size - 1;
            memcpy(into, line, end);
            into[end] = 0;
            return into;
        }
    }
    return NULL;
}

static long number_of(const char *settings, const char *name, long otherwise) {
    char text[32];
    return value_of(settings, name, text, sizeof text) ? atol(text) : otherwise;
}

static int private_file(const char *path) {
    int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    int high = file < 0 ? -1 : syscall(SYS_fcntl, file, F_DUPFD_CLOEXEC, 900);
    if (high >= 0) syscall(SYS_close, file);
    return high >= 0 ? high : file;
}

__attribute__((constructor)) static void begin(void) {
    const char *settings = getenv("FAULTS");
    char text[PATH_MAX], line[65536];
    if (!settings || !value_of(settings, "folder", folder, sizeof folder)) return;
    int file = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long got = file < 0 ? 0 : syscall(SYS_read, file, line, sizeof line - 1);
    if (file >= 0) syscall(SYS_close, file);
    for (long at = 0; at < got; at++)
        if (!line[at]) line[at] = ' ';
    line[got > 0 ? got : 0] = 0;
    if (value_of(settings, "command", text, sizeof text) && !strstr(line, text)) return;
    value_of(settings, "calls", calls, sizeof calls);
    first = number_of(settings, "first", 0);
    times = number_of(settings, "count", 1);
    error_number = number_of(settings, "errno", EIO);
    done_first = number_of(settings, "done", 0);
    to_kill = number_of(settings, "kill", 0);
    exact = number_of(settings, "exact", 0);
    if (value_of(settings, "log", text, sizeof text)) log_file = private_file(text);
    if (value_of(settings, "record", text, sizeof text)) record_file = private_file(text);
    chosen = 1;
}

static int is_listed(const char *name) {
    size_t length = strlen(name);
    for (const char *at = calls; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (!strncmp(at, name, length) && (at[length] == ',' || !at[length])) return 1;
    }
    return !calls[0];
}

/* The absolute path of PATH below the descriptor AT, or of the descriptor itself; NULL if it is not below the folder. */
static const char *place(int at, const char *path, char *into) {
    char link[64];
    size_t length = strlen(folder);
    if (path && *path == '/') {
        snprintf(into, PATH_MAX, "%s", path);
    } else {
        if (at == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        long got = syscall(SYS_readlinkat, AT_FDCWD, link, into, PATH_MAX - 2);
        if (got <= 0) return NULL;
        into[got] = 0;
        if (path) snprintf(into + got, PATH_MAX - got, "/%s", path);
    }
    return !strncmp(into, folder, length) && (!into[length] || into[length] == '/') ? into : NULL;
}

enum { PASS, FAIL, FAIL_AFTER };

/* Counts a call and says what becomes of it. */
static int judge(const char *name, const char *path) {
    if (!path || !is_listed(name) || (exact && strcmp(path, folder))) return PASS;
    long number = atomic_fetch_add(&counter, 1) + 1;
    if (log_file >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%d %ld %s %s\n", getpid(), number, name, path);
        syscall(SYS_write, log_file, line, length);
    }
    if (!first || number < first || number >= first + times) return PASS;
    if (to_kill && !done_first) kill(getpid(), SIGKILL);
    return done_first ? FAIL_AFTER : FAIL;
}

static int fail(void) {
    if (to_kill) kill(getpid(), SIGKILL);
    errno = error_number;
    return -1;
}

static long inode_at(int at, const char *path) {
    struct stat status;
    return fstatat(at, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : (long)status.st_ino;
}

static long inode_of(int file) {
    struct stat status;
    return fstat(file, &status) ? 0 : (long)status.st_ino;
}

/* A record: a line "CALL INODE NUMBER LENGTH PATH\tOTHER\n" and LENGTH bytes of data. */
static void record(const char *name, long inode, long number, const char *path, const char *other, const void *data,
                   size_t length) {
    char line[2 * PATH_MAX + 128];
    int size = snprintf(line, sizeof line, "%s %ld %ld %zu %s\t%s\n", name, inode, number, length, path ? path : "",
                        other ? other : "");
    struct iovec parts[2] = {{line, size}, {(void *)data, length}};
    syscall(SYS_writev, record_file, parts, 2);
}

/* The lock makes the order of the records that of the calls, among all processes. */
static void lock(void) {
    if (record_file >= 0) syscall(SYS_flock, record_file, LOCK_EX);
}

static void unlock(void) {
    int kept = errno;
    if (record_file >= 0) syscall(SYS_flock, record_file, LOCK_UN);
    errno = kept;
}

#define CHANGE(call, path, act, note)                                  \
    do {                                                               \
        if (!chosen) return act;                                       \
        const char *where = path;                                      \
        int verdict = judge(call, where);                              \
        if (verdict == FAIL) return fail();                            \
        if (where) lock();                                             \
        __typeof__(act) result = act;                                  \
        if (where && result >= 0 && record_file >= 0) { note; }        \
        if (where) unlock();                                           \
        return verdict == FAIL_AFTER && result >= 0 ? fail() : result; \
    } while (0)

static int opened(int at, const char *path, int flags, mode_t mode) {
    char text[PATH_MAX];
    int (*real)(int, const char *, int, ...) = REAL(openat);
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT)) && !(flags & O_DIRECTORY)) return real(at, path, flags, mode);
    if (!chosen) return real(at, path, flags, mode);
    const char *where = place(at, path, text);
    int verdict = judge("open", where);
    if (verdict == FAIL) return fail();
    if (where) lock();
    long before = where && record_file >= 0 ? inode_at(at, path) : 0;
    int file = real(at, path, flags, mode);
    if (where && file >= 0 && record_file >= 0) {
        if (!before && flags & O_CREAT) record("create", inode_of(file), 0, where, NULL, NULL, 0);
        else if (flags & O_TRUNC) record("truncate", inode_of(file), 0, where, NULL, NULL, 0);
    }
    if (where) unlock();
    if (verdict == FAIL_AFTER && file >= 0) {
        close(file);
        return fail();
    }
    return file;
}

#define OPEN                                                           \
    va_list more;                                                      \
    va_start(more, flags);                                             \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
    va_end(more);

int open(const char *path, int flags, ...) { OPEN return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { OPEN return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { OPEN return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { OPEN return opened(at, path, flags, mode); }

ssize_t write(int file, const void *data, size_t length) {
    char text[PATH_MAX];
    struct stat status;
    if (!chosen || file == log_file || file == record_file) return REAL(write)(file, data, length);
    CHANGE("write", place(file, NULL, text), REAL(write)(file, data, length), {
        long end = syscall(SYS_lseek, file, 0, SEEK_CUR);
        if (syscall(SYS_fcntl, file, F_GETFL) & O_APPEND && !fstat(file, &status)) end = status.st_size;
        record("write", inode_of(file), end - result, where, NULL, data, result);
    });
}

ssize_t pwrite(int file, const void *data, size_t length, off_t offset) {
    char text[PATH_MAX];
    CHANGE("pwrite", place(file, NULL, text), REAL(pwrite)(file, data, length, offset),
           record("write", inode_of(file), offset, where, NULL, data, result));
}

ssize_t pwrite64(int file, const void *data, size_t length, off64_t offset) {
    char text[PATH_MAX];
    CHANGE("pwrite", place(file, NULL, text), REAL(pwrite64)(file, data, length, offset),
           record("write", inode_of(file), offset, where, NULL, data, result));
}

int fsync(int file) {
    char text[PATH_MAX];
    CHANGE("fsync", place(file, NULL, text), REAL(fsync)(file),
           record("sync", inode_of(file), 0, where, NULL, NULL, 0));
}

int fdatasync(int file) {
    char text[PATH_MAX];
    CHANGE("fdatasync", place(file, NULL, text), REAL(fdatasync)(file),
           record("sync", inode_of(file), 0, where, NULL, NULL, 0));
}

int ftruncate(int file, off_t length) {
    char text[PATH_MAX];
    CHANGE("ftruncate", place(file, NULL, text), REAL(ftruncate)(file, length),
           record("truncate", inode_of(file), length, where, NULL, NULL, 0));
}

int ftruncate64(int file, off64_t length) {
    char text[PATH_MAX];
    CHANGE("ftruncate", place(file, NULL, text), REAL(ftruncate64)(file, length),
           record("truncate", inode_of(file), length, where, NULL, NULL, 0));
}

/* posix_fallocate returns its error. */
static int allocated(int file, off64_t offset, off64_t length) {
    char text[PATH_MAX];
    int (*real)(int, off64_t, off64_t) = REAL(posix_fallocate64);
    if (!chosen) return real(file, offset, length);
    const char *where = place(file, NULL, text);
    int verdict = judge("fallocate", where);
    if (verdict == FAIL) return fail(), error_number;
    if (where) lock();
    int result = real(file, offset, length);
    if (where && !result && record_file >= 0) record("extend", inode_of(file), offset + length, where, NULL, NULL, 0);
    if (where) unlock();
    return verdict == FAIL_AFTER && !result ? (fail(), error_number) : result;
}

int posix_fallocate(int file, off_t offset, off_t length) { return allocated(file, offset, length); }
int posix_fallocate64(int file, off64_t offset, off64_t length) { return allocated(file, offset, length); }

int renameat(int at, const char *path, int other_at, const char *other) {
    char text[PATH_MAX], other_text[PATH_MAX];
    place(at, path, text);
    CHANGE("rename", place(other_at, other, other_text), REAL(renameat)(at, path, other_at, other),
           record("rename", 0, 0, text, where, NULL, 0));
}

int rename(const char *path, const char *other) { return renameat(AT_FDCWD, path, AT_FDCWD, other); }

int linkat(int at, const char *path, int other_at, const char *other, int flags) {
    char text[PATH_MAX], other_text[PATH_MAX];
    place(at, path, text);
    CHANGE("link", place(other_at, other, other_text), REAL(linkat)(at, path, other_at, other, flags),
           record("link", inode_at(other_at, other), 0, text, where, NULL, 0));
}

int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }

int unlinkat(int at, const char *path, int flags) {
    char text[PATH_MAX];
    CHANGE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", place(at, path, text), REAL(unlinkat)(at, path, flags),
           record(flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0, 0, where, NULL, NULL, 0));
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *path, mode_t mode) {
    char text[PATH_MAX];
    CHANGE("mkdir", place(at, path, text), REAL(mkdirat)(at, path, mode),
           record("mkdir", inode_at(at, path), 0, where, NULL, NULL, 0));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* Copies within the kernel are refused, so that programs fall back to write(2). */
ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    char text[PATH_MAX];
    if (chosen && place(out, NULL, text)) return errno = EINVAL, -1;
    return REAL(sendfile)(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) { return sendfile(out, in, offset, count); }

ssize_t copy_file_range(int in, off64_t *at, int out, off64_t *to, size_t count, unsigned flags) {
    char text[PATH_MAX];
    if (chosen && place(out, NULL, text)) return errno = ENOSYS, -1;
    return REAL(copy_file_range)(in, at, out, to, count, flags);
}
