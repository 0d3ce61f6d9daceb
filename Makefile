# make test   everything that CI runs        make demo   fresh machine -> a streamed answer, then stops
# make up     the stack, until Ctrl-C        make proto  regenerate common/pb from proto/
PY := .venv/bin/python
PB ?= common/pb

.PHONY: proto

proto: ## Regenerates the gRPC stubs from proto/ into $(PB).
	@mkdir -p $(PB) && tmp=$$(mktemp -d) && \
	PATH="$$PWD/.venv/bin:$$PATH" $(PY) -m grpc_tools.protoc -Iproto --python_out=$$tmp --grpc_python_out=$$tmp \
	    --mypy_out=quiet:$$tmp --mypy_grpc_out=quiet:$$tmp proto/baton/v1/*.proto && \
	sed -i -E 's/(from|import) baton\.v1\b/\1 common.pb/; s/\bbaton\.v1\.([a-z]+_pb2)/common.pb.\1/g' $$tmp/baton/v1/* && \
	cp $$tmp/baton/v1/* $(PB)/ && rm -r $$tmp
