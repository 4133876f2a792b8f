/* System calls on files of chosen folders that fail, are cut or end the process at the n-th: preloaded (LD_PRELOAD),
   controlled by a mapped file.

   The file that FAULT_CONTROL names holds `struct control`, shared by all processes that inherit the variable, so that a
   test arms and disarms a running process, and counts over its children too. Every wrapper makes the kernel's call
   itself: nothing is looked up, so nothing can be called before it is ready. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, CREATE, READ, WRITE, SYNC, SPACE, RENAME, UNLINK, MKDIR, STAT, LIST, MAP, LOCK, TOUCH, CLOSE, LINK };
enum { ONCE, SAME_FILE, EVERYTHING };

#define SHORT (-1)
#define KILL (-2)
#define FOLDERS 2
#define PATH_BYTES 1024
#define TRACED 4096
#define CALL_BYTES 24
#define TRACED_PATH_BYTES 228

struct control {
    int32_t armed;
    int32_t error;     /* errno; SHORT: half of the bytes, for READ and WRITE alone; KILL: the process ends here, a
                          WRITE with half of its bytes */
    uint32_t kinds;    /* bits of the enum above: which calls count, and fail */
    int32_t lasts;     /* ONCE: `times` calls from the n-th on; SAME_FILE: every later call on its file; EVERYTHING */
    uint64_t nth;      /* from 1; 0: only count */
    uint64_t times;
    uint64_t seen;     /* calls that counted */
    uint64_t injected; /* calls that failed */
    char first_call[CALL_BYTES];
    char first_path[PATH_BYTES];
    char folders[FOLDERS][PATH_BYTES];
    struct { /* the calls, in order, where they are only counted */
        int32_t kind;
        char call[CALL_BYTES];
        char path[TRACED_PATH_BYTES];
    } trace[TRACED];
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("FAULT_CONTROL");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) return;
    long mapped = syscall(SYS_mmap, 0, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
    if (mapped != -1) control = (struct control *)mapped;
    syscall(SYS_close, fd);
}

static int watched(const char *path) {
    for (int i = 0; i < FOLDERS; i++) {
        size_t length = strlen(control->folders[i]);
        if (length && !strncmp(path, control->folders[i], length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

static void end_process(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); }

/* Whether this call on `path` is to fail; errno is set. Calls on other folders do not count. */
static int fails_on(const char *call, int kind, const char *path) {
    if (!watched(path)) return 0;
    uint64_t number = __atomic_add_fetch(&control->seen, 1, __ATOMIC_SEQ_CST);
    if (!control->nth && number <= TRACED) {
        control->trace[number - 1].kind = kind;
        strncpy(control->trace[number - 1].call, call, CALL_BYTES - 1);
        strncpy(control->trace[number - 1].path, path, TRACED_PATH_BYTES - 1);
    }
    if (!control->nth || number < control->nth) return 0;
    if (control->error == SHORT && kind != READ && kind != WRITE) return 0; /* threads came in another order */
    if (number == control->nth) {
        strncpy(control->first_call, call, sizeof control->first_call - 1);
        strncpy(control->first_path, path, PATH_BYTES - 1);
    } else if (control->lasts == ONCE ? number >= control->nth + control->times
                                      : control->lasts == SAME_FILE && strcmp(path, control->first_path)) {
        return 0;
    }
    __atomic_add_fetch(&control->injected, 1, __ATOMIC_SEQ_CST);
    if (control->error == KILL && kind != WRITE) end_process();
    if (control->error > 0) errno = control->error;
    return 1;
}

static int counted(int kind) { return control && control->armed && (control->kinds >> kind & 1); }

static int fd_path(int fd, char *path) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int kept = errno;
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_BYTES - 1);
    errno = kept;
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static int fails_fd(const char *call, int kind, int fd) {
    char path[PATH_BYTES];
    return counted(kind) && fd >= 0 && fd_path(fd, path) && fails_on(call, kind, path);
}

static int fails_at(const char *call, int kind, int folder, const char *name) {
    if (!counted(kind) || !name) return 0;
    if (!strncmp(name, "/proc/self/fd/", 14)) return fails_fd(call, kind, atoi(name + 14)); /* the open file itself */
    if (name[0] == '/') return fails_on(call, kind, name);
    char path[2 * PATH_BYTES] = "";
    if (folder == AT_FDCWD ? syscall(SYS_getcwd, path, PATH_BYTES) < 0 : !fd_path(folder, path)) return 0;
    if (*name) {
        strcat(path, "/");
        strncat(path, name, PATH_BYTES - 2);
    }
    return fails_on(call, kind, path);
}

/* A failed call returns -1 with errno. One that is cut is made with half of the bytes, and may be the last. */
#define FAIL_OR_FEWER(failing, count, make)                              \
    int fails = (failing);                                               \
    if (fails && control->error > 0) return -1;                          \
    if (fails && (count) > 1) (count) /= 2;                              \
    ssize_t made = (make);                                               \
    if (fails && control->error == KILL) end_process();                  \
    return made;

/* Opening */

static int open_at(const char *call, int folder, const char *path, int flags, mode_t mode) {
    if (fails_at(call, flags & O_CREAT ? CREATE : OPEN, folder, path)) return -1;
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE_OF(flags)                                                   \
    mode_t mode = 0;                                                     \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                             \
        va_list rest;                                                    \
        va_start(rest, flags);                                           \
        mode = va_arg(rest, mode_t);                                     \
        va_end(rest);                                                    \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_at("open", AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_at("open", AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) {
    MODE_OF(flags) return open_at("openat", folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE_OF(flags) return open_at("openat", folder, path, flags, mode);
}
int __open_2(const char *path, int flags) { return open_at("open", AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_at("open", AT_FDCWD, path, flags, 0); }
int creat(const char *path, mode_t mode) {
    return open_at("creat", AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* What a network file system says at last: it could not keep what was written. */
int close(int fd) {
    int fails = 0;
    if (counted(CLOSE)) {
        long flags = syscall(SYS_fcntl, fd, F_GETFL);
        fails = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY && fails_fd("close", CLOSE, fd);
    }
    int error = errno;
    int result = (int)syscall(SYS_close, fd);
    if (!fails) return result;
    errno = error;
    return -1;
}

/* Reading and writing */

ssize_t read(int fd, void *buffer, size_t count) {
    FAIL_OR_FEWER(fails_fd("read", READ, fd), count, syscall(SYS_read, fd, buffer, count))
}
ssize_t __read_chk(int fd, void *buffer, size_t count, size_t size) { return (void)size, read(fd, buffer, count); }
ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
    FAIL_OR_FEWER(fails_fd("pread", READ, fd), count, syscall(SYS_pread64, fd, buffer, count, offset))
}
ssize_t pread(int fd, void *buffer, size_t count, off_t offset) { return pread64(fd, buffer, count, offset); }
ssize_t __pread_chk(int fd, void *buffer, size_t count, off_t offset, size_t size) {
    return (void)size, pread64(fd, buffer, count, offset);
}
ssize_t __pread64_chk(int fd, void *buffer, size_t count, off64_t offset, size_t size) {
    return (void)size, pread64(fd, buffer, count, offset);
}
ssize_t write(int fd, const void *buffer, size_t count) {
    FAIL_OR_FEWER(fails_fd("write", WRITE, fd), count, syscall(SYS_write, fd, buffer, count))
}
ssize_t pwrite64(int fd, const void *buffer, size_t count, off64_t offset) {
    FAIL_OR_FEWER(fails_fd("pwrite", WRITE, fd), count, syscall(SYS_pwrite64, fd, buffer, count, offset))
}
ssize_t pwrite(int fd, const void *buffer, size_t count, off_t offset) { return pwrite64(fd, buffer, count, offset); }

/* Fewer bytes of several buffers: half of the first. */
#define VECTOR(failing, number, ...)                                     \
    struct iovec half;                                                   \
    int fails = (failing);                                               \
    if (fails && control->error > 0) return -1;                          \
    if (fails && count > 0 && parts[0].iov_len > 1) {                    \
        half = parts[0];                                                 \
        half.iov_len /= 2;                                               \
        parts = &half;                                                   \
        count = 1;                                                       \
    }                                                                    \
    ssize_t made = syscall(number, fd, parts, count, ##__VA_ARGS__);     \
    if (fails && control->error == KILL) end_process();                  \
    return made;

ssize_t readv(int fd, const struct iovec *parts, int count) { VECTOR(fails_fd("readv", READ, fd), SYS_readv) }
ssize_t writev(int fd, const struct iovec *parts, int count) { VECTOR(fails_fd("writev", WRITE, fd), SYS_writev) }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    VECTOR(fails_fd("preadv", READ, fd), SYS_preadv2, offset, 0L, flags)
}
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) {
    VECTOR(fails_fd("pwritev", WRITE, fd), SYS_pwritev2, offset, 0L, flags)
}
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return preadv2(fd, parts, count, offset, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    return pwritev2(fd, parts, count, offset, flags);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    VECTOR(fails_fd("preadv", READ, fd), SYS_preadv, offset, 0L)
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return preadv(fd, parts, count, offset);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    VECTOR(fails_fd("pwritev", WRITE, fd), SYS_pwritev, offset, 0L)
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(fd, parts, count, offset);
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *where, size_t count, unsigned flags) {
    FAIL_OR_FEWER(fails_fd("copy_file_range", WRITE, to), count, syscall(SYS_copy_file_range, from, at, to, where, count, flags))
}
ssize_t sendfile(int to, int from, off_t *at, size_t count) {
    FAIL_OR_FEWER(fails_fd("sendfile", WRITE, to), count, syscall(SYS_sendfile, to, from, at, count))
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t count) { return sendfile(to, from, at, count); }

#define UNLESS(failing, call)                                            \
    {                                                                    \
        if ((failing)) return -1;                         \
        return (int)(call);                                              \
    }

/* Nothing here loses power: files of watched folders are not brought to the disk, which takes longer than all else. */
static int sync_fd(const char *call, int number, int fd) {
    char path[PATH_BYTES];
    if (fails_fd(call, SYNC, fd)) return -1;
    return control && fd_path(fd, path) && watched(path) ? 0 : (int)syscall(number, fd);
}
int fsync(int fd) { return sync_fd("fsync", SYS_fsync, fd); }
int fdatasync(int fd) { return sync_fd("fdatasync", SYS_fdatasync, fd); }
int ftruncate64(int fd, off64_t size) UNLESS(fails_fd("ftruncate", SPACE, fd), syscall(SYS_ftruncate, fd, size))
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int fallocate64(int fd, int mode, off64_t offset, off64_t size)
    UNLESS(fails_fd("fallocate", SPACE, fd), syscall(SYS_fallocate, fd, mode, offset, size))
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }
/* This one returns the number; where the file system has no fallocate glibc writes instead, which we leave to it. */
int posix_fallocate64(int fd, off64_t offset, off64_t size) {
    if (fails_fd("posix_fallocate", SPACE, fd)) return errno;
    return syscall(SYS_fallocate, fd, 0, offset, size) ? errno : 0;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

/* Names */

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
    UNLESS(fails_at("rename", RENAME, to, new), syscall(SYS_renameat2, from, old, to, new, flags))
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags)
    UNLESS(fails_at("link", RENAME, to, new), syscall(SYS_linkat, from, old, to, new, flags))
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlinkat(const char *target, int to, const char *new)
    UNLESS(fails_at("symlink", RENAME, to, new), syscall(SYS_symlinkat, target, to, new))
int symlink(const char *target, const char *new) { return symlinkat(target, AT_FDCWD, new); }
int unlinkat(int folder, const char *path, int flags)
    UNLESS(fails_at("unlink", UNLINK, folder, path), syscall(SYS_unlinkat, folder, path, flags))
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int remove(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int folder, const char *path, mode_t mode)
    UNLESS(fails_at("mkdir", MKDIR, folder, path), syscall(SYS_mkdirat, folder, path, mode))
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* What is known of a file */

static int stat_at(const char *call, int folder, const char *path, void *status, int flags)
    UNLESS(fails_at(call, STAT, folder, path), syscall(SYS_newfstatat, folder, path, status, flags))
static int stat_fd(int fd, void *status) UNLESS(fails_fd("fstat", STAT, fd), syscall(SYS_fstat, fd, status))

int stat(const char *path, struct stat *status) { return stat_at("stat", AT_FDCWD, path, status, 0); }
int stat64(const char *path, struct stat64 *status) { return stat_at("stat", AT_FDCWD, path, status, 0); }
int lstat(const char *path, struct stat *status) {
    return stat_at("lstat", AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
int lstat64(const char *path, struct stat64 *status) {
    return stat_at("lstat", AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}
int fstat(int fd, struct stat *status) { return stat_fd(fd, status); }
int fstat64(int fd, struct stat64 *status) { return stat_fd(fd, status); }
int fstatat(int folder, const char *path, struct stat *status, int flags) {
    return stat_at("fstatat", folder, path, status, flags);
}
int fstatat64(int folder, const char *path, struct stat64 *status, int flags) {
    return stat_at("fstatat", folder, path, status, flags);
}
/* As programs and wheels built with an older glibc call them. */
int __xstat(int version, const char *path, struct stat *status) { return (void)version, stat(path, status); }
int __xstat64(int version, const char *path, struct stat64 *status) { return (void)version, stat64(path, status); }
int __lxstat(int version, const char *path, struct stat *status) { return (void)version, lstat(path, status); }
int __lxstat64(int version, const char *path, struct stat64 *status) { return (void)version, lstat64(path, status); }
int __fxstat(int version, int fd, struct stat *status) { return (void)version, fstat(fd, status); }
int __fxstat64(int version, int fd, struct stat64 *status) { return (void)version, fstat64(fd, status); }
int __fxstatat(int version, int folder, const char *path, struct stat *status, int flags) {
    return (void)version, fstatat(folder, path, status, flags);
}
int __fxstatat64(int version, int folder, const char *path, struct stat64 *status, int flags) {
    return (void)version, fstatat64(folder, path, status, flags);
}
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *status)
    UNLESS(fails_at("statx", STAT, folder, path), syscall(SYS_statx, folder, path, flags, mask, status))
int faccessat(int folder, const char *path, int mode, int flags)
    UNLESS(fails_at("access", STAT, folder, path), syscall(SYS_faccessat, folder, path, mode, flags))
int access(const char *path, int mode) { return faccessat(AT_FDCWD, path, mode, 0); }

int utimensat(int folder, const char *path, const struct timespec times[2], int flags)
    UNLESS(fails_at("utimensat", TOUCH, folder, path), syscall(SYS_utimensat, folder, path, times, flags))
int futimens(int fd, const struct timespec times[2])
    UNLESS(fails_fd("futimens", TOUCH, fd), syscall(SYS_utimensat, fd, NULL, times, 0))
int chmod(const char *path, mode_t mode)
    UNLESS(fails_at("chmod", TOUCH, AT_FDCWD, path), syscall(SYS_fchmodat, AT_FDCWD, path, mode))
int fchmod(int fd, mode_t mode) UNLESS(fails_fd("fchmod", TOUCH, fd), syscall(SYS_fchmod, fd, mode))
int fchmodat(int folder, const char *path, mode_t mode, int flags)
    UNLESS(fails_at("chmod", TOUCH, folder, path), ((void)flags, syscall(SYS_fchmodat, folder, path, mode)))
int flock(int fd, int operation) UNLESS(fails_fd("flock", LOCK, fd), syscall(SYS_flock, fd, operation))

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}
int fcntl64(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *given = va_arg(rest, void *);
    va_end(rest);
    if (is_lock(command) && fails_fd("fcntl", LOCK, fd)) return -1;
    return (int)syscall(SYS_fcntl, fd, command, given);
}

ssize_t readlinkat(int folder, const char *path, char *buffer, size_t size) {
    if (fails_at("readlink", LINK, folder, path)) return -1;
    return syscall(SYS_readlinkat, folder, path, buffer, size);
}
ssize_t readlink(const char *path, char *buffer, size_t size) { return readlinkat(AT_FDCWD, path, buffer, size); }
ssize_t __readlink_chk(const char *path, char *buffer, size_t size, size_t room) {
    return (void)room, readlink(path, buffer, size);
}
ssize_t __readlinkat_chk(int folder, const char *path, char *buffer, size_t size, size_t room) {
    return (void)room, readlinkat(folder, path, buffer, size);
}

/* Folders: only glibc knows its DIR */

DIR *opendir(const char *path) {
    static DIR *(*real)(const char *);
    if (fails_at("opendir", LIST, AT_FDCWD, path)) return NULL;
    if (!real) real = (DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir");
    return real(path);
}
struct dirent64 *readdir64(DIR *folder) {
    static struct dirent64 *(*real)(DIR *);
    if (fails_fd("readdir", LIST, dirfd(folder))) return NULL;
    if (!real) real = (struct dirent64 * (*)(DIR *)) dlsym(RTLD_NEXT, "readdir64");
    return real(folder);
}
struct dirent *readdir(DIR *folder) { return (struct dirent *)readdir64(folder); }

/* Mappings of files; all others pass at once */

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    if (fd >= 0 && fails_fd("mmap", MAP, fd)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}
void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap64(address, size, protection, flags, fd, offset);
}
